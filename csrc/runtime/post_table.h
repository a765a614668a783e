#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "runtime/buffer_pool.h"
#include "runtime/pump.h"
#include "transport/transport.h"
#include "wire/header.h"

namespace herring::runtime {

struct PumpPeer {
  PumpTraffic traffic;
  Instant heard{};          // What last came from it came then.
  bool is_linked = false;   // One of PumpLinks::peers.
  bool is_pinged = false;   // A Ping is on its way ...
  bool is_ponged = false;   // ... or a Pong,
  bool owes_pong = false;   // and after it goes another.
  std::uint32_t sends = 0;  // The transport has so many to it ...
  Instant moved{};          // ... and last finished one then, or took the first.
};

enum class PostKind : std::uint8_t { kFree, kSend, kPing, kPong, kReceive, kControl };

/// One post and the buffer that its header lives in until the transport is done with it.
struct Post {
  PostKind kind = PostKind::kFree;
  bool is_large = false;
  bool is_withdrawn = false;
  std::span<std::byte> buffer;
  std::span<const std::byte> payload;  // The engine's memory.
  std::span<std::byte> copy_to;        // Of a receive: where what came into `buffer` goes.
  Token token;                         // The engine's.
  PeerId to;                           // Of a send.
  PeerId from = kAnyPeer;              // Of a receive of the pool.
  PumpPeer* peer = nullptr;            // Of a send: lives as long as the pump.
};

/// What a pump has given to its endpoint, and the memory of its own that this uses. A post's index is its token there.
class PostTable final {
 public:
  /// Header and an Announce; every send but an error text fits.
  static constexpr std::size_t kSmallBytes = 256;

  PostTable(transport::Endpoint& endpoint, const PumpOptions& options)
      : domain_(endpoint.memory()),
        buffers_(domain_, kSmallBytes, kSmallPerSlab,
                 wire::kHeaderBytes + std::max(options.max_body_bytes, kSmallBytes),
                 std::clamp<std::size_t>(options.control_receives, 1, kSmallPerSlab)) {}

  /// Nothing where a send has to wait for a buffer. Throws Error where there is none for a receive.
  std::optional<std::size_t> add(PostKind kind, bool is_large) {
    const std::span<std::byte> buffer = buffers_.take(is_sent(kind), is_large);
    if (buffer.empty()) return std::nullopt;
    std::size_t index = posts_.size();
    if (free_.empty()) {
      posts_.emplace_back();
    } else {
      index = free_.back();
      free_.pop_back();
    }
    Post& post = posts_[index];
    post = {};
    post.kind = kind;
    post.is_large = is_large;
    post.buffer = buffer;
    return index;
  }

  void free(std::size_t index) {
    Post& post = posts_[index];
    buffers_.give_back(is_sent(post.kind), post.is_large, post.buffer);
    post.kind = PostKind::kFree;
    if (!holds_.empty()) holds_.erase(index);
    free_.push_back(index);
  }

  /// Of a payload that nobody else has registered, until the post is free.
  Status register_payload(std::size_t index) {
    const std::span<const std::byte> payload = posts_[index].payload;
    if (payload.empty() || domain_ == nullptr) return Status::ok();
    try {
      auto* const memory = const_cast<std::byte*>(payload.data());
      holds_[index] = domain_->hold({memory, payload.size()});
    } catch (const Error& error) {
      return error.status();
    }
    return Status::ok();
  }

  /// Where memory has to be registered: a small payload may lie anywhere, and a copy costs less than that.
  bool fits(std::size_t head, std::span<const std::byte> payload) const {
    return domain_ != nullptr && !payload.empty() && head + payload.size() <= buffers_.large_bytes();
  }

  Post& operator[](std::size_t index) { return posts_[index]; }
  std::size_t size() const { return posts_.size(); }
  std::size_t in_use() const { return posts_.size() - free_.size(); }
  auto begin() const { return posts_.begin(); }
  auto end() const { return posts_.end(); }

 private:
  static constexpr std::size_t kSmallPerSlab = 64;
  static bool is_sent(PostKind kind) {
    return kind == PostKind::kSend || kind == PostKind::kPing || kind == PostKind::kPong;
  }

  memory::Domain* domain_;
  PostBuffers buffers_;
  std::deque<Post> posts_;
  std::vector<std::size_t> free_;
  std::unordered_map<std::size_t, memory::Hold> holds_;
};

}  // namespace herring::runtime
