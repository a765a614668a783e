#include "runtime/operation_order.h"

#include <utility>

namespace herring::runtime {
namespace {

using Bytes = std::span<const std::byte>;

bool share_memory(const OrderedCall& call, Bytes reads, Bytes writes) {
  return overlap(call.writes, writes) || overlap(call.writes, reads) || overlap(call.reads, writes);
}

std::string label(const OrderedCall& call) {
  std::string text = to_string(call.descriptor);
  if (!call.name.empty()) text += " '" + call.name + "'";
  return text;
}

std::string label(OperationOrder::Borrower borrower, std::string_view name) {
  const std::string text(name);
  return borrower == OperationOrder::Borrower::kTensor ? "allreduce '" + text + "'" : text;
}

Status refuse(const std::string& what, const std::string& other) {
  return Status(Code::kInvalidArgument, what + ": its memory is in use by " + other +
                                            ", which is still pending; wait for that one first, or use other memory");
}

}  // namespace

OrderedCall OperationOrder::call_of(const Request& request, std::uint32_t index) {
  OrderedCall call;
  call.descriptor = request.descriptor;
  call.name = request.name.value_or("");
  call.has_number = request.key.has_value();
  call.is_lent = request.is_lent;
  call.is_keyed = request.key || request.name;
  if (call.is_keyed) call.key = {request.group, request.key ? *request.key : name_key(*request.name), 0};
  call.is_named = call.is_keyed && (call.key.op & kNamedKey) != 0;
  call.writes = request.output;
  const bool is_told = request.descriptor.collective == Collective::kBroadcast && request.descriptor.root != index;
  if (!is_told && !overlap(request.input, request.output)) call.reads = request.input;
  return call;
}

/// The same name again: the order of its uses is the same on all ranks.
bool OperationOrder::is_behind(const OrderedCall& call, const OrderedCall& other) const {
  return call.is_keyed && other.is_keyed && call.key == other.key;
}

Status OperationOrder::check(const OrderedCall& call) const {
  const std::scoped_lock lock(mutex_);
  if (call.is_keyed) {
    const auto same = by_key_.find(call.key);
    const OrderedCall* const before = same == by_key_.end() ? nullptr : same->second;
    if (before != nullptr && (call.has_number || before->has_number)) {
      return Status(Code::kInvalidArgument, label(call) + ": its number is that of " + label(*before) +
                                                ", which is still pending; a number may be used once");
    }
    if (before != nullptr && call.name != before->name) {
      return Status(Code::kInvalidArgument, label(call) + ": its name has the same hash as that of " + label(*before) +
                                                ", which is still pending; choose another name");
    }
  }
  for (std::size_t i = 0; i < lent_.size(); ++i) {
    if (call.is_lent && i == static_cast<std::size_t>(Borrower::kTensor)) continue;
    if (!lent_[i].is_free(call.reads, call.writes)) return refuse(label(call), borrower_of(call.reads, call.writes));
  }
  if (operations_.is_free(call.reads, call.writes)) return Status::ok();
  for (const auto& other : pending_) {
    if (!share_memory(*other, call.reads, call.writes) || is_behind(call, *other)) continue;
    if (call.is_named || other->is_named) return refuse(label(call), label(*other));
  }
  return Status::ok();
}

void OperationOrder::enter(const std::shared_ptr<OrderedCall>& call) {
  const std::scoped_lock lock(mutex_);
  const bool is_first = !call->is_keyed || !by_key_.contains(call->key);
  if (!is_first || !operations_.is_free(call->reads, call->writes)) {
    for (const auto& other : pending_) {
      if (!is_behind(*call, *other) && !share_memory(*other, call->reads, call->writes)) continue;
      other->followers.push_back(call);
      ++call->waits_for;
    }
  }
  if (call->is_keyed) by_key_[call->key] = call.get();
  operations_.add(call->reads, call->writes);
  call->place = pending_.size();
  pending_.push_back(call);
  ++entered_;
}

bool OperationOrder::leave(OrderedCall& call) {
  const std::scoped_lock lock(mutex_);
  const std::size_t place = std::exchange(call.place, OrderedCall::kNowhere);
  if (place == OrderedCall::kNowhere) return false;
  if (call.is_keyed) {
    const auto found = by_key_.find(call.key);
    if (found != by_key_.end() && found->second == &call) by_key_.erase(found);
  }
  operations_.remove(call.reads, call.writes);
  bool any = false;
  for (const auto& follower : std::exchange(call.followers, {})) any |= --follower->waits_for == 0;
  if (place + 1 < pending_.size()) {
    pending_[place] = std::move(pending_.back());
    pending_[place]->place = place;
  }
  pending_.pop_back();
  --entered_;
  return any;
}

std::shared_ptr<const OrderedCall> OperationOrder::waiting_for(const Work* work) const {
  const std::scoped_lock lock(mutex_);
  for (const auto& call : pending_) {
    if (call->work == work) return call;
  }
  return nullptr;
}

Status OperationOrder::lend(Borrower borrower, std::string_view name, Bytes reads, Bytes writes,
                            std::shared_ptr<void>& lease) {
  if (reads.empty() && writes.empty()) return Status::ok();
  // Made without the lock, and in one piece with its counts: a thousand tensors are lent in a row.
  const auto loan = std::make_shared<Loan>(shared_from_this(), borrower, name, reads, writes);
  const std::scoped_lock lock(mutex_);
  for (const MemoryInUse& lent : lent_) {
    if (!lent.is_free(reads, writes)) return refuse(label(borrower, name), borrower_of(reads, writes));
  }
  if (!operations_.is_free(reads, writes)) {
    for (const auto& other : pending_) {
      if (share_memory(*other, reads, writes)) return refuse(label(borrower, name), label(*other));
    }
  }
  lent_[static_cast<std::size_t>(borrower)].add(reads, writes);
  loan->place = loans_.size();
  loans_.push_back(loan.get());
  ++entered_;
  lease = loan;
  return Status::ok();
}

OperationOrder::Loan::Loan(std::shared_ptr<OperationOrder> lender, Borrower who, std::string_view named, Bytes read,
                           Bytes written)
    : order(std::move(lender)), borrower(who), name(named), reads(read), writes(written) {}

OperationOrder::Loan::~Loan() {
  const std::scoped_lock lock(order->mutex_);
  if (place == OrderedCall::kNowhere) return;  // It was refused.
  order->lent_[static_cast<std::size_t>(borrower)].remove(reads, writes);
  order->loans_[place] = order->loans_.back();
  order->loans_[place]->place = place;
  order->loans_.pop_back();
  --order->entered_;
}

std::string OperationOrder::borrower_of(Bytes reads, Bytes writes) const {
  for (const Loan* loan : loans_) {
    const bool overlaps = overlap(loan->writes, writes) || overlap(loan->writes, reads) || overlap(loan->reads, writes);
    if (loan->borrower == Borrower::kTensor && overlaps) return label(loan->borrower, loan->name);
  }
  return "a message from worker to worker";
}

}  // namespace herring::runtime
