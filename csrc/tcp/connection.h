#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/types.h"
#include "tcp/address.h"
#include "tcp/block_pool.h"
#include "tcp/frame.h"
#include "tcp/handshake.h"
#include "tcp/receiver.h"
#include "tcp/scatter.h"

namespace herring::tcp {

struct Connection;

/// A send that was accepted and has not completed.
struct Send {
  Token token;
  Tag tag;
  FrameBytes frame{};
  TwoSpans<const std::byte> memory;
  Send* next = nullptr;

  std::size_t total() const { return kFrameBytes + memory.size(); }
};

struct Peer {
  PeerId id;
  EndpointAddress address;
  std::string text;                  // For errors: "192.0.2.2:41234".
  Connection* connection = nullptr;  // Where sends go, once it stands.

  // First come, first served; of the first `sent` bytes have left.
  Send* first = nullptr;
  Send* last = nullptr;
  std::size_t count = 0;
  std::size_t bytes = 0;  // Not yet sent.
  std::size_t sent = 0;
  bool is_dirty = false;  // In the endpoint's list of peers to send to with the next poll.

  // While there is no connection: in the endpoint's list of those who wait.
  bool is_waiting = false;
  Instant waiting_since{};
  Instant next_try{};
  Duration pause{0};  // Between tries; grows.
  std::string last_error;
};

enum class Stage : std::uint8_t {
  kConnecting,      ///< The system is at it.
  kAwaitingAnswer,  ///< Hello is sent.
  kAwaitingHello,   ///< Accepted; nothing is known of the other end.
  kAwaitingProof,   ///< Answer is sent.
  kOpen,
};

/// One socket. Either end may send on it, whoever connected.
struct Connection {
  int socket = -1;
  std::uint32_t index = 0;
  std::uint32_t generation = 0;  // Of the place: an event of who was here before is not for this one.
  Stage stage = Stage::kConnecting;
  Peer* peer = nullptr;  // Whose sends go this way; null for one that others use alone.
  Instance other{};      // The endpoint at the other end, once that is proven.
  std::string text;      // Its address, for people.
  Nonce nonce{};
  HelloBytes hello{};
  std::array<std::byte, std::max({kHelloBytes, kAnswerBytes, kProofBytes})> greeting{};
  std::size_t greeting_bytes = 0;
  Instant deadline{};        // Of the handshake.
  bool is_readable = false;  // In the endpoint's list of those to read.
  bool is_writable = true;   // The last send was not cut short.
  Inflow in;

  bool is_outgoing() const { return stage == Stage::kConnecting || stage == Stage::kAwaitingAnswer; }
  std::uint64_t name() const { return std::uint64_t{generation} << 32 | index; }
};

}  // namespace herring::tcp
