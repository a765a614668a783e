#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"
#include "tcp/block_pool.h"
#include "tcp/scatter.h"

namespace herring::tcp {

struct Inflow;

/// A posted receive.
struct Receive {
  Token token;
  Tag tag;
  TwoSpans<std::byte> memory;
  Inflow* from = nullptr;     // Where a message is landing in it.
  bool is_cancelled = false;  // ... and the caller has asked for it back, by
  Instant cancel_due{};       // then at the latest.

  Receive* next = nullptr;  // Free ones.
  Receive* next_tag = nullptr;
  Receive* next_same = nullptr;  // Others with the same tag: the one in the table's chain leads.
  Receive* previous_same = nullptr;
  Receive* next_token = nullptr;
};

/// All posted receives of an endpoint, found by tag and by token in the time of one look.
class ReceiveTable final {
 public:
  ReceiveTable() : by_tag_(kFirstBuckets), by_token_(kFirstBuckets) {}

  std::size_t size() const { return pool_.taken(); }
  Receive* add(Tag tag, const TwoSpans<std::byte>& memory, Token token);
  /// A receive for a message with this tag, no more found by its tag from now on; null where there is none.
  Receive* take(Tag tag);
  Receive* find(Token token);
  /// Not found by its tag any more. Only of one that take() has not given.
  void unlink_tag(Receive* receive);
  /// After take() or unlink_tag().
  void remove(Receive* receive);

 private:
  static constexpr std::size_t kFirstBuckets = 256;

  static std::size_t bucket(std::uint64_t key, std::size_t buckets) {
    return static_cast<std::size_t>((key * 0x9E37'79B9'7F4A'7C15ull) >> 32) & (buckets - 1);
  }
  Receive** tag_slot(Tag tag);
  void link_tag(Receive* receive);
  void grow();

  BlockPool<Receive> pool_;
  std::vector<Receive*> by_tag_;
  std::vector<Receive*> by_token_;
};

}  // namespace herring::tcp
