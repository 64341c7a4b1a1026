// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which experts each token goes to.
//
// The file is text, plain or gzipped: one token a line, its expert ids, a comma, and the router's
// weight for each, separated by blanks. Lines that are empty or start with '#' are comments.
//
//   # expert ids,weights; one token a line
//   43 5 7 58,0.0964 0.0518 0.0392 0.0368
//
// All tokens have the same number of experts (top-k), each expert once.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moe {

struct routing {
  std::string source;  ///< the file, or how it was generated
  int experts = 0;
  int top_k = 0;
  std::vector<std::int32_t> ids;  ///< tokens x top_k
  std::vector<float> weights;     ///< tokens x top_k

  std::size_t tokens() const { return top_k == 0 ? 0 : ids.size() / static_cast<unsigned>(top_k); }
};

/// Reads a file. `experts` is their number, or 0 to take the highest id + 1. Throws
/// invalid_argument as "file:line: what is wrong" for anything that is not as described above.
routing read_routing(const std::string& path, int experts = 0);

/// The same from text; `name` leads the messages.
routing parse_routing(std::string_view text, const std::string& name, int experts = 0);

struct routing_recipe {
  int experts = 64;
  int top_k = 4;
  std::size_t tokens = 4096;
  /// Expert i is wanted with weight 1 / (i + 1)^skew (Zipf): 0 is uniform, and since experts are
  /// spread over ranks in order, more skew means a busier rank 0.
  double skew = 0;
  std::uint64_t seed = 1;
};

/// Draws each token's experts without repetition; weights fall with the choice and sum to 1.
routing generate_routing(const routing_recipe& recipe);

}  // namespace moe
