// SPDX-License-Identifier: Apache-2.0
#include "picture.hpp"

#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace moe {

namespace {

constexpr const char* k_device = "#2b6cb0";
constexpr const char* k_host = "#dd8437";
constexpr const char* k_rows = "#1a202c";
constexpr const char* k_spill = "#c53030";
constexpr const char* k_faint = "#a0aec0";
constexpr double k_margin = 24;
constexpr double k_label_width = 300;

/// Collects the shapes of a document.
class canvas {
 public:
  void rect(double x, double y, double width, double height, std::string_view fill,
            std::string_view more = "") {
    body_ += fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" )"
                         R"(fill="{}" {}/>)"
                         "\n",
                         x, y, std::max(width, 0.0), std::max(height, 0.0), fill, more);
  }
  void line(double x1, double y1, double x2, double y2, std::string_view more) {
    body_ += fmt::format(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" {}/>)"
                         "\n",
                         x1, y1, x2, y2, more);
  }
  void text(double x, double y, std::string_view words, std::string_view more = "") {
    body_ += fmt::format(R"(<text x="{:.1f}" y="{:.1f}" {}>)", x, y, more);
    for (const char c : words) {
      if (c == '<') {
        body_ += "&lt;";
      } else if (c == '&') {
        body_ += "&amp;";
      } else {
        body_ += c;
      }
    }
    body_ += "</text>\n";
  }
  std::string document(double width, double height) const {
    return fmt::format(
        R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" )"
        R"(viewBox="0 0 {0:.0f} {1:.0f}" font-family="Helvetica, Arial, sans-serif" )"
        R"(font-size="12" fill="#1a202c">)"
        "\n"
        R"(<rect width="{0:.0f}" height="{1:.0f}" fill="#ffffff"/>)"
        "\n{2}</svg>\n",
        width, height, body_);
  }

 private:
  std::string body_;
};

constexpr std::string_view k_heading = R"(font-size="14" font-weight="bold")";
constexpr std::string_view k_middle = R"(text-anchor="middle")";
constexpr std::string_view k_right = R"(text-anchor="end")";

/// Both panels stand under each other; each draws from `y` and returns where it ends.
class picture {
 public:
  explicit picture(const run_record& run)
      : run_(run),
        cell_(std::clamp(800.0 / run.ranks, 100.0, 400.0)),
        width_(2 * k_margin + k_label_width + run.ranks * (cell_ + k_gap)) {}

  std::string make() {
    double y = k_margin + 12;
    on_.text(k_margin, y, fmt::format("MoE exchange over {} ranks", run_.ranks),
             R"(font-size="18" font-weight="bold")");
    on_.text(k_margin, y + 20,
             fmt::format("{}; hidden {}; region {} a rank, device {}{}", run_.routing, run_.hidden,
                         size_text(run_.most_region_bytes), size_text(run_.device_capacity),
                         run_.device_cap == 0 ? ""
                                              : fmt::format(", DEVICE part capped at {}",
                                                            size_text(run_.device_cap))));
    y = legend(y + 44);
    y = region(y + 30);
    const double top = y + 30;
    const double below_matrix = matrix(top);
    const double below_bars = received(top);
    return on_.document(width_, std::max(below_matrix, below_bars) + k_margin);
  }

 private:
  static constexpr double k_gap = 16;

  double legend(double y) {
    double x = k_margin;
    const auto entry = [&](std::string_view words, const auto& swatch) {
      swatch(x);
      on_.text(x + 24, y + 10, words);
      x += 44 + 7.2 * static_cast<double>(words.size());
    };
    const auto filled = [&](const char* colour, double height) {
      return [this, y, colour, height](double at) {
        on_.rect(at, y + (12 - height) / 2, 18, height, colour);
      };
    };
    entry("DEVICE segment", filled(k_device, 12));
    entry("HOST_NUMA segment", filled(k_host, 12));
    entry("reserved only", [&](double at) { unbacked(at, y, 18, 12); });
    entry("rows of the last step", filled(k_rows, 4));
    entry("rows in HOST_NUMA: spill", filled(k_spill, 4));
    if (run_.larger_than_device()) {
      entry(run_.device_cap != 0 ? "cap on DEVICE" : "size of the device",
            [&](double at) { limit(at + 9, y - 2, y + 14); });
    }
    return y + 12;
  }

  void unbacked(double x, double y, double width, double height) {
    on_.rect(x, y, width, height, "none",
             fmt::format(R"(stroke="{}" stroke-dasharray="3 2")", k_faint));
  }
  void limit(double x, double from, double to) {
    on_.line(x, from, x, to,
             fmt::format(R"(stroke="{}" stroke-width="1.5" stroke-dasharray="4 2")", k_rows));
  }

  double x_of(int rank) const { return k_margin + k_label_width + rank * (cell_ + k_gap); }

  /// Moments go down, ranks across.
  double region(double y) {
    constexpr double row = 30;
    constexpr double bar = 14;
    const double scale =
        cell_ / static_cast<double>(std::max<std::size_t>(1, run_.most_region_bytes));
    on_.text(k_margin, y, "Segments of each rank's part", k_heading);
    for (int r = 0; r < run_.ranks; ++r) on_.text(x_of(r), y, fmt::format("rank {}", r));
    y += 14;
    const double top = y;
    for (const auto& at : run_.moments) {
      on_.text(k_margin, y + 11, at.label);
      for (std::size_t r = 0; r < at.segments.size(); ++r) {
        const double x = x_of(static_cast<int>(r));
        unbacked(x, y, cell_, bar);
        for (const auto& part : at.segments[r]) {
          const bool device = part.where.kind == evmm::tier::device;
          on_.rect(x + scale * static_cast<double>(part.offset), y,
                   scale * static_cast<double>(part.bytes), bar, device ? k_device : k_host,
                   R"(stroke="#ffffff" stroke-width="1")");
          const auto end = std::min<std::uint64_t>(at.used[r], part.offset + part.bytes);
          if (end <= part.offset) continue;
          on_.rect(x + scale * static_cast<double>(part.offset), y + bar + 2,
                   scale * static_cast<double>(end - part.offset), 4, device ? k_rows : k_spill);
        }
      }
      y += row;
    }
    if (run_.larger_than_device()) {
      for (int r = 0; r < run_.ranks; ++r) {
        limit(x_of(r) + scale * static_cast<double>(run_.device_limit()), top - 4, y - 4);
      }
    }
    return y;
  }

  /// Who sent how much to whom, darker for more.
  double matrix(double y) {
    const traffic_matrix traffic = run_.traffic();
    const double side = std::clamp(260.0 / run_.ranks, 34.0, 56.0);
    on_.text(k_margin, y, "Dispatched from rank (down) to rank (across), MiB", k_heading);
    const double x = k_margin + 24;
    y += 30;
    std::uint64_t most = 1;
    for (int s = 0; s < run_.ranks; ++s) {
      for (int t = 0; t < run_.ranks; ++t) most = std::max(most, traffic.at(s, t).total());
    }
    for (int s = 0; s < run_.ranks; ++s) {
      on_.text(x + (s + 0.5) * side, y - 6, std::to_string(s), k_middle);
      on_.text(x - 8, y + (s + 0.5) * side + 4, std::to_string(s), k_right);
      for (int t = 0; t < run_.ranks; ++t) {
        const auto bytes = static_cast<double>(traffic.at(s, t).total());
        const double share = bytes / static_cast<double>(most);
        on_.rect(x + t * side, y + s * side, side, side, k_device,
                 fmt::format(R"(fill-opacity="{:.3f}" stroke="#ffffff")", 0.06 + 0.94 * share));
        on_.text(x + (t + 0.5) * side, y + (s + 0.5) * side + 4,
                 fmt::format("{:.{}f}", bytes / (1 << 20), bytes < 10.0 * (1 << 20) ? 1 : 0),
                 fmt::format(R"(text-anchor="middle" font-size="{:.0f}" fill="{}")",
                             side < 40 ? 9.0 : 11.0, share > 0.5 ? "#ffffff" : "#1a202c"));
      }
    }
    return y + run_.ranks * side;
  }

  /// What each rank received in each step, by tier.
  double received(double y) {
    const double x = k_margin + 460;
    const double width = std::max(width_ - k_margin - x, 200.0);
    constexpr double height = 200;
    on_.text(x, y, "Rows received in each step, by rank and tier", k_heading);
    y += 30;
    std::uint64_t most = 1;
    for (const auto& step : run_.steps_done) {
      for (int r = 0; r < run_.ranks; ++r) most = std::max(most, step.traffic.into(r).total());
    }
    const double scale = height / static_cast<double>(most);
    const auto groups = static_cast<double>(std::max<std::size_t>(1, run_.steps_done.size()));
    const double group = width / groups;
    const double bar = std::min(40.0, group * 0.8 / run_.ranks);
    on_.text(x - 6, y + 4, size_text(most), k_right);
    on_.text(x - 6, y + height + 4, "0", k_right);
    on_.line(x, y, x, y + height, fmt::format(R"(stroke="{}")", k_faint));
    on_.line(x, y + height, x + width, y + height, fmt::format(R"(stroke="{}")", k_faint));
    for (std::size_t s = 0; s < run_.steps_done.size(); ++s) {
      const double left = x + group * static_cast<double>(s) + group * 0.1;
      for (int r = 0; r < run_.ranks; ++r) {
        const tier_bytes bytes = run_.steps_done[s].traffic.into(r);
        const double device = scale * static_cast<double>(bytes.device);
        const double host = scale * static_cast<double>(bytes.host);
        on_.rect(left + r * bar, y + height - device, bar - 1, device, k_device);
        on_.rect(left + r * bar, y + height - device - host, bar - 1, host, k_host);
        if (bar >= 12) {
          on_.text(left + (r + 0.5) * bar, y + height + 13, std::to_string(r),
                   R"(text-anchor="middle" font-size="10")");
        }
      }
      if (group >= 40) {
        on_.text(left + run_.ranks * bar / 2, y + height + 29,
                 fmt::format("step {}", run_.steps_done[s].step), k_middle);
      }
    }
    return y + height + 32;
  }

  const run_record& run_;
  canvas on_;
  double cell_;
  double width_;
};

}  // namespace

std::string draw(const run_record& run) {
  return picture(run).make();
}

}  // namespace moe
