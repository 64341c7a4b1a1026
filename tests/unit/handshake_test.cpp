// SPDX-License-Identifier: Apache-2.0
#include "comm/handshake.hpp"

#include "comm/handle_messages.hpp"
#include "comm/unix_sockets.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

namespace evmm::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::HasSubstr;
using testing::StartsWith;

/// A node of ranks that are threads, with what each would have learnt from the bootstrap.
struct node_of_threads {
  explicit node_of_threads(int size) {
    fill_random(secret);
    for (int r = 0; r < size; ++r) {
      listening.push_back(listen_locally());
      node.push_back({10 + r, own_credentials(), listening.back().name});  // 10: not the node rank
    }
  }
  std::vector<unique_fd> connect(int rank, milliseconds timeout = std::chrono::seconds(20)) {
    const auto self = static_cast<std::size_t>(rank);
    return connect_node(listening[self], node, self, secret, steady_clock::now() + timeout,
                        timeout);
  }
  std::vector<std::exception_ptr> connect_all() {
    return run_ranks(static_cast<int>(node.size()), [&](int rank) {
      const auto links = connect(rank);
      for (std::size_t i = 0; i < links.size(); ++i) {
        EXPECT_EQ(static_cast<bool>(links[i]), i != static_cast<std::size_t>(rank));
      }
    });
  }

  job_secret secret{};
  std::vector<listening_socket> listening;
  std::vector<endpoint> node;
};

unique_fd call(const listening_socket& callee, const hello& says) {
  auto socket = try_connect(callee.name);
  EXPECT_EQ(send_packet(socket.get(), std::as_bytes(std::span{&says, 1})), transfer::done);
  return socket;
}

bool hung_up(const unique_fd& socket) {
  return receive_packet(socket.get()).result == transfer::closed;
}

TEST(handshake, connects_all_pairs) {
  for (const int size : {1, 2, 5}) {
    for (const auto& failure : node_of_threads(size).connect_all()) EXPECT_EQ(what(failure), "");
  }
}

TEST(handshake, turns_strangers_away_and_goes_on) {
  node_of_threads ranks(3);
  hello right;
  right.secret = ranks.secret;
  right.rank = 11;
  auto wrong_secret = right;
  wrong_secret.secret[31] ^= std::byte{1};
  auto wrong_magic = right;
  wrong_magic.magic ^= 1;
  auto no_rank = right;
  no_rank.rank = 99;
  std::vector<unique_fd> turned_away;
  for (const auto& says : {wrong_secret, wrong_magic, no_rank}) {
    turned_away.push_back(call(ranks.listening[0], says));
  }
  // Too short, too long, and one that carries a descriptor, which must not stay here.
  for (const std::size_t size : {std::size_t{1}, sizeof(hello) + 1, k_packet_bytes + 1}) {
    auto socket = try_connect(ranks.listening[0].name);
    ASSERT_EQ(send_packet(socket.get(), std::vector<std::byte>(size), std::array{0}),
              transfer::done);
    turned_away.push_back(std::move(socket));
  }
  auto silent = try_connect(ranks.listening[0].name);
  auto gone = try_connect(ranks.listening[0].name);
  gone.reset();
  for (const auto& failure : ranks.connect_all()) EXPECT_EQ(what(failure), "");
  for (const auto& socket : turned_away) EXPECT_TRUE(hung_up(socket));
  EXPECT_TRUE(hung_up(silent));
}

TEST(handshake, serves_each_rank_once) {
  node_of_threads ranks(2);
  hello says;
  says.secret = ranks.secret;
  says.rank = 11;
  const auto first = call(ranks.listening[0], says);
  const auto second = call(ranks.listening[0], says);
  const auto links = ranks.connect(0);
  EXPECT_TRUE(links[1]);
  EXPECT_EQ(receive_packet(first.get()).bytes.size(), sizeof(hello));
  EXPECT_TRUE(hung_up(second));
}

TEST(handshake, names_the_version_that_does_not_match) {
  node_of_threads ranks(2);
  hello says;
  says.secret = ranks.secret;
  says.rank = 11;
  says.version = 7;
  const auto peer = call(ranks.listening[0], says);
  EXPECT_THAT(thrown_by([&] { ranks.connect(0); }),
              StartsWith("peer_error: rank 11 speaks version 7 of the handle exchange, rank 10 "
                         "version 1"));
}

TEST(handshake, serves_only_the_process_that_was_announced) {
  node_of_threads ranks(2);
  hello says;
  says.secret = ranks.secret;
  says.rank = 11;
  for (const bool other_user : {false, true}) {
    auto& who = ranks.node[1].who;
    who = own_credentials();
    other_user ? ++who.user : static_cast<uid_t>(++who.process);
    const auto peer = call(ranks.listening[0], says);
    EXPECT_THAT(thrown_by([&] { ranks.connect(0, milliseconds(100)); }),
                StartsWith("timed_out: rank 11 did not arrive in connecting the node's ranks"));
    EXPECT_TRUE(hung_up(peer));
  }
}

TEST(handshake, shows_the_secret_only_to_the_process_that_was_announced) {
  node_of_threads ranks(2);
  ++ranks.node[0].who.process;
  EXPECT_THAT(thrown_by([&] { ranks.connect(1); }),
              StartsWith("peer_error: the socket of rank 10 belongs to another process or user"));
  const auto caller = accept_waiting(ranks.listening[0].socket.get());
  ASSERT_TRUE(caller);
  EXPECT_TRUE(hung_up(caller)) << "it said something";
}

TEST(handshake, names_ranks_that_are_gone_or_hang_up) {
  node_of_threads ranks(3);
  ranks.listening[0].socket.reset();
  EXPECT_THAT(thrown_by([&] { ranks.connect(1); }),
              StartsWith("peer_error: rank 10 cannot be reached: "));
  node_of_threads others(2);
  const auto thrown = run_ranks(2, [&](int rank) {
    if (rank == 1) others.connect(1);
    if (rank != 0) return;
    unique_fd guest;
    std::array waiting{pollfd{others.listening[0].socket.get(), POLLIN, 0}};
    wait_ready(waiting, steady_clock::now() + std::chrono::seconds(20));
    accept_waiting(others.listening[0].socket.get()).reset();
  });
  EXPECT_THAT(what(thrown[1]), StartsWith("peer_error: rank 10 hung up while ranks"));
}

TEST(unix_sockets, leave_nothing_on_disk_and_have_names_of_their_own) {
  const auto one = listen_locally();
  const auto other = listen_locally();
  EXPECT_NE(one.name, other.name);
  std::ostringstream all;
  all << std::ifstream("/proc/net/unix").rdbuf();
  const std::string name(one.name.begin(), one.name.end());
  EXPECT_THAT(all.str(), HasSubstr(" @evmm-" + name));  // '@': abstract, without a file
}

// --- messages ----------------------------------------------------------------------------------

struct pair_of_sockets {
  pair_of_sockets() {
    std::array<int, 2> made{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, made.data()),
              0);
    a = unique_fd(made[0]);
    b = unique_fd(made[1]);
  }
  unique_fd a, b;
};

TEST(unix_sockets, carry_descriptors_that_programs_do_not_inherit) {
  const pair_of_sockets pair;
  const std::vector<int> fds(k_packet_descriptors, 0);
  ASSERT_EQ(send_packet(pair.a.get(), std::vector<std::byte>(5), fds), transfer::done);
  const auto got = receive_packet(pair.b.get());
  ASSERT_EQ(got.fds.size(), fds.size());
  EXPECT_EQ(got.bytes.size(), 5u);
  EXPECT_FALSE(got.cut || got.fds_lost);
  for (const auto& fd : got.fds) EXPECT_EQ(::fcntl(fd.get(), F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(receive_packet(pair.b.get()).result, transfer::not_now);
}

TEST(unix_sockets, say_when_they_are_full_or_closed) {
  pair_of_sockets pair;
  const std::vector<std::byte> packet(k_packet_bytes);
  std::size_t sent = 0;
  while (send_packet(pair.a.get(), packet) == transfer::done) ++sent;
  EXPECT_GT(sent, 0u);
  EXPECT_EQ(receive_packet(pair.b.get()).bytes.size(), packet.size());
  pair.b.reset();
  EXPECT_EQ(send_packet(pair.a.get(), packet), transfer::closed);
  EXPECT_EQ(receive_packet(pair.a.get()).result, transfer::closed);
}

/// A packet with one handle by descriptor, as it arrives.
struct one_handle {
  message_header header;
  wire_handle handle;
  std::size_t fds = 1;
  bool cut = false;
  std::size_t missing = 0;  ///< bytes at the end

  one_handle() {
    header.magic = k_exchange_magic;
    header.version = k_exchange_version;
    header.sequence = 5;
    header.total = header.count = 1;
    header.payload = sizeof handle;
    handle.bytes = 4096;
    handle.share = static_cast<std::uint32_t>(share_kind::fd);
  }
  std::string refusal() const {
    received_packet packet;
    packet.result = transfer::done;
    packet.bytes = wire_writer().put(header).put(handle).take();
    packet.bytes.resize(packet.bytes.size() - missing);
    packet.cut = cut;
    for (std::size_t i = 0; i < fds; ++i) packet.fds.emplace_back(::dup(0));
    return thrown_by([&] { read_packet(packet, "rank 3"); });
  }
};

TEST(handle_messages, are_checked_in_all_they_say) {
  EXPECT_EQ(one_handle().refusal(), "");
  const auto refused = [](const std::function<void(one_handle&)>& spoil) {
    one_handle packet;
    spoil(packet);
    return packet.refusal();
  };
  using packet = one_handle;
  EXPECT_THAT(refused([](packet& p) { p.header.magic = 0; }),
              StartsWith("peer_error: rank 3 sent a broken handle message: it does not begin"));
  EXPECT_THAT(refused([](packet& p) { p.header.version = 2; }), HasSubstr("version 2, not 1"));
  EXPECT_THAT(refused([](packet& p) { p.missing = 8; }),
              HasSubstr("announces 88 bytes and has 80"));
  EXPECT_THAT(refused([](packet& p) { p.missing = 100; }), HasSubstr("is 12 bytes short"));
  EXPECT_THAT(refused([](packet& p) { p.cut = true; }), HasSubstr("has 88 or more"));
  EXPECT_THAT(refused([](packet& p) { p.header.payload = 87; }), HasSubstr("announces 87"));
  EXPECT_THAT(refused([](packet& p) { p.header.kind = message_kind{9}; }), HasSubstr("kind 9"));
  EXPECT_THAT(refused([](packet& p) { p.header.count = 2; }), HasSubstr("handles 0 to 2 of 1"));
  EXPECT_THAT(refused([](packet& p) { p.header.first = 1; }), HasSubstr("handles 1 to 2 of 1"));
  EXPECT_THAT(refused([](packet& p) { p.header.first = ~0U; }), HasSubstr("handles 4294967295"));
  EXPECT_THAT(refused([](packet& p) { p.header.total = ~0U; }), HasSubstr("of 4294967295"));
  EXPECT_THAT(refused([](packet& p) { p.header.count = 0; }), HasSubstr("handles 0 to 0 of 1"));
  EXPECT_THAT(refused([](packet& p) { p.handle.share = 7; }), HasSubstr("makes no sense"));
  EXPECT_THAT(refused([](packet& p) { p.handle.bytes = 0; }), HasSubstr("makes no sense"));
  EXPECT_THAT(refused([](packet& p) { p.handle.kind = 2; }), HasSubstr("makes no sense"));
  EXPECT_THAT(refused([](packet& p) { p.fds = 0; }), HasSubstr("0 descriptors for 1 handles"));
  EXPECT_THAT(refused([](packet& p) { p.fds = 2; }), HasSubstr("2 descriptors for 1 handles"));
  EXPECT_THAT(
      refused([](packet& p) { p.handle.share = static_cast<std::uint32_t>(share_kind::fabric); }),
      HasSubstr("1 descriptors for 0 handles"));
}

TEST(handle_messages, carry_errors_of_any_length) {
  const wire_error why{error_category::out_of_memory,
                       {std::string(100'000, 'x'), "a short help", 12}};
  const auto sent = error_message(message_kind::failure, 3, why);
  EXPECT_LE(sent.bytes.size(), k_packet_bytes);
  received_packet packet;
  packet.result = transfer::done;
  packet.bytes = sent.bytes;
  const auto read = read_packet(packet, "rank 0");
  EXPECT_EQ(read.header.sequence, 3u);
  EXPECT_EQ(read.why.category, error_category::out_of_memory);
  EXPECT_EQ(read.why.info.message, std::string(4096, 'x'));
  EXPECT_EQ(read.why.info.help, "a short help");
  EXPECT_EQ(read.why.info.native_code, 12);
}

}  // namespace
}  // namespace evmm::test
