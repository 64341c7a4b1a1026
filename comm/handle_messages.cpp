// SPDX-License-Identifier: Apache-2.0
#include "comm/handle_messages.hpp"

#include "comm/handshake.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace evmm {

namespace {

static_assert(sizeof(message_header) == 32 && sizeof(wire_handle) == 88,
              "no padding: it would carry what lay in memory");
static_assert(sizeof(message_header) + k_packet_descriptors * sizeof(wire_handle) <=
              k_packet_bytes);

/// Far beyond any use; keeps a broken peer from making this rank allocate without bound.
constexpr std::uint32_t k_most_handles = 1U << 20;
/// Longer texts are cut, so that an error always fits a packet.
constexpr std::size_t k_longest_text = 4096;

message_header header_of(message_kind kind, std::uint64_t sequence) {
  message_header header;
  header.magic = k_exchange_magic;
  header.version = k_exchange_version;
  header.kind = kind;
  header.sequence = sequence;
  return header;
}

wire_handle export_one(const physical_memory& memory, share_kind transport,
                       std::vector<unique_fd>& fds) {
  const auto& made = memory.request();
  wire_handle handle;
  handle.bytes = made.bytes;
  handle.kind = static_cast<std::int32_t>(made.where.kind);
  handle.index = made.where.index;
  handle.share = static_cast<std::uint32_t>(made.share);
  handle.rdma = made.rdma ? 1 : 0;
  if (made.share == share_kind::fd) {
    fds.push_back(memory.export_fd());
  } else if (made.share == share_kind::fabric && transport == share_kind::fabric) {
    handle.fabric = memory.export_fabric();
  } else {
    throw invalid_argument(
        fmt::format("memory of {} cannot be exchanged: {}", to_string(made.where),
                    made.share == share_kind::none
                        ? "it was created without sharing"
                        : "not every rank of the node can import fabric handles"),
        "create it with the share_kind that transport() names");
  }
  return handle;
}

}  // namespace

allocation_request wire_handle::request() const {
  return {.bytes = bytes,
          .where = {static_cast<tier>(kind), index},
          .share = static_cast<share_kind>(share),
          .rdma = rdma != 0};
}

std::vector<outgoing_packet> handles_message(std::uint64_t sequence,
                                             std::span<const physical_memory* const> memory,
                                             share_kind transport) {
  if (memory.size() > k_most_handles) {
    throw invalid_argument(fmt::format("{} handles in one exchange", memory.size()),
                           fmt::format("it takes up to {}", k_most_handles));
  }
  std::vector<outgoing_packet> packets;
  std::size_t first = 0;
  do {  // a message without handles is one packet too
    const auto part = memory.subspan(first, std::min(k_packet_descriptors, memory.size() - first));
    auto header = header_of(message_kind::handles, sequence);
    header.total = static_cast<std::uint32_t>(memory.size());
    header.first = static_cast<std::uint32_t>(first);
    header.count = static_cast<std::uint32_t>(part.size());
    header.payload = static_cast<std::uint32_t>(part.size() * sizeof(wire_handle));
    outgoing_packet packet;
    wire_writer out;
    out.put(header);
    for (const physical_memory* one : part) {
      if (one == nullptr) throw invalid_argument("a null pointer among the memory to exchange");
      out.put(export_one(*one, transport, packet.fds));
    }
    packet.bytes = out.take();
    packets.push_back(std::move(packet));
    first += part.size();
  } while (first < memory.size());
  return packets;
}

outgoing_packet error_message(message_kind kind, std::uint64_t sequence, const wire_error& why) {
  wire_writer text;
  put_error(text, why.category,
            {why.info.message.substr(0, k_longest_text), why.info.help.substr(0, k_longest_text),
             why.info.native_code});
  const auto payload = text.take();
  auto header = header_of(kind, sequence);
  header.payload = static_cast<std::uint32_t>(payload.size());
  wire_writer out;
  out.put(header).append(payload);
  return {out.take(), {}};
}

incoming_packet read_packet(const received_packet& packet, const std::string& sender) {
  const auto refuse = [&](const std::string& why) {
    throw peer_error(fmt::format("{} sent a broken handle message: {}", sender, why),
                     "run the same evmm on all ranks");
  };
  wire_reader in(packet.bytes, sender);
  incoming_packet read;
  auto& header = read.header;
  header = in.get<message_header>();
  if (header.magic != k_exchange_magic) refuse("it does not begin like one");
  if (header.version != k_exchange_version) {
    refuse(fmt::format("it is of version {}, not {}", header.version, k_exchange_version));
  }
  const auto payload = packet.bytes.size() - sizeof header;
  if (packet.cut || header.payload != payload) {
    refuse(fmt::format("it announces {} bytes and has {}{}", header.payload, payload,
                       packet.cut ? " or more" : ""));
  }
  std::size_t fds = 0;
  switch (header.kind) {
    case message_kind::handles:
      if (header.total > k_most_handles || header.count > k_packet_descriptors ||
          header.first > header.total || header.count > header.total - header.first ||
          (header.count == 0 && header.total != 0) ||
          header.payload != header.count * sizeof(wire_handle)) {
        refuse(fmt::format("handles {} to {} of {} in {} bytes", header.first,
                           std::uint64_t{header.first} + header.count, header.total, payload));
      }
      for (std::uint32_t i = 0; i < header.count; ++i) {
        const auto handle = in.get<wire_handle>();
        const bool by_fd = handle.share == static_cast<std::uint32_t>(share_kind::fd);
        const bool by_fabric = handle.share == static_cast<std::uint32_t>(share_kind::fabric);
        if ((!by_fd && !by_fabric) || handle.bytes == 0 || handle.kind < 0 ||
            handle.kind > static_cast<std::int32_t>(tier::host)) {
          refuse("a handle's description makes no sense");
        }
        fds += by_fd ? 1 : 0;
        read.handles.push_back(handle);
      }
      break;
    case message_kind::failure:
    case message_kind::lost:
      read.why = get_error(in);
      break;
    default:
      refuse(fmt::format("it is of unknown kind {}", static_cast<int>(header.kind)));
  }
  if (!packet.fds_lost && fds != packet.fds.size()) {
    refuse(fmt::format("it has {} descriptors for {} handles", packet.fds.size(), fds));
  }
  return read;
}

}  // namespace evmm
