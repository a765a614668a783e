#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <rdma/fi_domain.h>

#include "core/types.h"
#include "memory/domain.h"

/// What an endpoint remembers about its posts and its peers. No allocation once the pool has grown to the most posts
/// that were ever pending.
namespace herring::efa {

struct Operation;

struct Peer {
  PeerId id;
  fi_addr_t address = FI_ADDR_UNSPEC;
  std::vector<std::byte> name;  // As given to fi_av_insert.
  std::string text;             // For errors: "192.0.2.2:41234".
  bool removed = false;
  std::size_t in_provider = 0;  // Sends that libfabric holds; their operations point here.
  // Sends that the provider had no room or no connection for, first come first served.
  Operation* first_waiting = nullptr;
  Operation* last_waiting = nullptr;
  std::size_t waiting = 0;
  bool listed = false;    // In the endpoint's list of peers with waiting sends.
  Instant waiting_since;  // Since when nothing has moved.
  Instant next_try;
  Duration pause{0};            // Between tries; grows.
  std::int64_t last_error = 0;  // Of the last try, for the error text.
};

enum class OperationState : std::uint8_t { kFree, kSend, kWaitingSend, kReceive };

struct Operation {
  fi_context2 context{};  // First: the provider hands back its address.
  Token token;
  Tag tag;
  Peer* peer = nullptr;  // Sends only.
  OperationState state = OperationState::kFree;
  bool cancel_requested = false;
  std::uint8_t spans = 0;  // Used entries of the arrays below; empty spans are left out.
  std::array<iovec, 2> span{};
  std::array<void*, 2> descriptor{};
  std::array<memory::Hold, 2> holds;  // Of what the descriptors stand for.
  std::size_t bytes = 0;
  Operation* next = nullptr;  // Free list, or the peer's waiting sends.
};
static_assert(std::is_standard_layout_v<Operation>);
static_assert(offsetof(Operation, context) == 0);

/// Operations at addresses that never change. Grows in blocks up to its limit.
class OperationPool final {
 public:
  explicit OperationPool(std::size_t limit) : limit_(limit) {}

  /// Null at the limit.
  Operation* take() {
    if (free_ == nullptr && !grow()) return nullptr;
    Operation* operation = free_;
    free_ = operation->next;
    operation->next = nullptr;
    return operation;
  }
  bool has_room() const { return free_ != nullptr || may_grow(); }
  void give_back(Operation* operation) noexcept {
    operation->state = OperationState::kFree;
    for (memory::Hold& hold : operation->holds) hold.reset();
    operation->peer = nullptr;
    operation->cancel_requested = false;
    operation->next = free_;
    free_ = operation;
  }
  template <class Call>
  void for_each(const Call& call) {
    for (auto& block : blocks_) {
      for (Operation& operation : *block) call(operation);
    }
  }
  /// The pending receive with this token, or null. Looks at all operations: for cancelling only.
  Operation* find_receive(Token token) noexcept {
    for (auto& block : blocks_) {
      for (Operation& operation : *block) {
        if (operation.state == OperationState::kReceive && operation.token == token) return &operation;
      }
    }
    return nullptr;
  }

 private:
  static constexpr std::size_t kBlock = 256;
  using Block = std::array<Operation, kBlock>;

  bool may_grow() const { return blocks_.size() * kBlock < limit_; }
  bool grow() {
    if (!may_grow()) return false;
    blocks_.push_back(std::make_unique<Block>());
    for (Operation& operation : *blocks_.back()) {
      operation.next = free_;
      free_ = &operation;
    }
    return true;
  }

  std::size_t limit_;
  std::vector<std::unique_ptr<Block>> blocks_;
  Operation* free_ = nullptr;
};

}  // namespace herring::efa
