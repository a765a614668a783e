#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "memory/domain.h"
#include "transport/forwarding_endpoint.h"

/// What a network card that reads and writes memory by itself forgives nobody, on top of any other endpoint: memory is
/// registered while a post uses it.
namespace herring::transport {

struct StrictOptions {
  /// Empty: all work. Throws Error where a registration is to fail.
  std::function<void(std::size_t bytes)> on_register;
  /// What to do where one is not forgiven. Must be set.
  std::function<void(const std::string& what)> on_fault;
};

/// The card of all strict endpoints of one domain.
class StrictNic final : public memory::Nic {
 public:
  using Memory = std::span<const std::byte>;

  explicit StrictNic(StrictOptions options) : options_(std::move(options)) {}
  ~StrictNic() override {
    if (!regions_.empty()) fault(std::to_string(regions_.size()) + " registrations outlive their card");
    if (!posts_.empty()) fault("posts outlive their card");
  }

  std::string description() const override { return "strict"; }
  bool takes(MemoryKind kind) const noexcept override { return is_on_host(kind); }
  std::unique_ptr<memory::Registration> register_memory(std::span<std::byte> memory, MemoryPlace) override {
    if (options_.on_register) options_.on_register(memory.size());
    const std::scoped_lock lock(mutex_);
    auto region = std::make_unique<Region>(*this, next_++);
    regions_.emplace(region->id, memory);
    return region;
  }

  void began(const Endpoint& endpoint, Token token, Memory first, Memory second) {
    const std::scoped_lock lock(mutex_);
    posts_[{&endpoint, token.value}].emplace_back(first, second);
  }
  void ended(const Endpoint& endpoint, Token token) {
    const std::scoped_lock lock(mutex_);
    const auto found = posts_.find({&endpoint, token.value});
    if (found == posts_.end()) return fault("a post completes twice");
    found->second.pop_back();  // Users of one token for two posts at once name the same memory.
    if (found->second.empty()) posts_.erase(found);
  }
  void all_ended(const Endpoint& endpoint) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(posts_, [&endpoint](const auto& entry) { return entry.first.first == &endpoint; });
  }
  bool covers(Memory memory) const {
    const std::scoped_lock lock(mutex_);
    return covers_locked(memory);
  }
  void fault(const std::string& what) const { options_.on_fault("a strict endpoint: " + what); }

 private:
  struct Region final : memory::Registration {
    Region(StrictNic& of, std::uint64_t number) : nic(of), id(number) {}
    ~Region() override { nic.release(id); }
    void* descriptor() const noexcept override { return const_cast<Region*>(this); }
    StrictNic& nic;
    const std::uint64_t id;
  };

  void release(std::uint64_t id) {
    const std::scoped_lock lock(mutex_);
    const auto found = regions_.find(id);
    const Memory gone = found->second;
    regions_.erase(found);
    const auto lost = [&](Memory memory) {
      return memory.data() < gone.data() + gone.size() && gone.data() < memory.data() + memory.size() &&
             !covers_locked(memory);
    };
    for (const auto& [post, uses] : posts_) {
      for (const auto& [first, second] : uses) {
        if (lost(first) || lost(second)) fault("memory is released while a post uses it");
      }
    }
  }
  bool covers_locked(Memory memory) const {
    if (memory.empty()) return true;
    for (const auto& [id, region] : regions_) {
      if (memory.data() >= region.data() && memory.data() + memory.size() <= region.data() + region.size()) return true;
    }
    return false;
  }

  const StrictOptions options_;
  mutable std::mutex mutex_;  // guards all below
  std::map<std::uint64_t, Memory> regions_;
  std::map<std::pair<const Endpoint*, std::uint64_t>, std::vector<std::pair<Memory, Memory>>> posts_;
  std::uint64_t next_ = 1;
};

/// An endpoint on it.
class StrictCard : public ForwardingEndpoint {
 public:
  /// Endpoints of one domain share its card; `options` are those of the first. The domain outlives them.
  StrictCard(std::unique_ptr<Endpoint> inner, memory::Domain& domain, const StrictOptions& options)
      : ForwardingEndpoint(std::move(inner)), domain_(domain) {
    const auto& nics = domain.nics();
    for (std::size_t i = 0; i < nics.size() && nic_ == nullptr; ++i) {
      nic_ = std::dynamic_pointer_cast<StrictNic>(nics[i]);
      place_ = memory::NicId{static_cast<std::uint32_t>(i)};
    }
    if (nic_ != nullptr) return;
    nic_ = std::make_shared<StrictNic>(options);
    place_ = domain.add_nic(nic_);
  }
  ~StrictCard() override {
    inner_.reset();  // Nothing uses the memory any more.
    nic_->all_ended(*this);
  }

  std::string description() const override { return inner_->description() + ", strict"; }
  memory::Domain* memory() const override { return &domain_; }

  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override {
    if (Status status = check(first, second); !status.is_ok()) return status;
    const Status status = inner_->post_send(to, tag, first, second, token);
    if (status.is_ok()) nic_->began(*this, token, first, second);
    return status;
  }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override {
    if (Status status = check(first, second); !status.is_ok()) return status;
    const Status status = inner_->post_receive(tag, first, second, token);
    if (status.is_ok()) nic_->began(*this, token, first, second);
    return status;
  }

  std::size_t poll(std::span<Completion> completions) override {
    const std::size_t count = inner_->poll(completions);
    for (std::size_t i = 0; i < count; ++i) nic_->ended(*this, completions[i].token);
    return count;
  }
  void shut_down() override {
    inner_->shut_down();
    nic_->all_ended(*this);
  }

 private:
  /// As a real endpoint would: by what the domain knows, which the card has to know too.
  Status check(StrictNic::Memory first, StrictNic::Memory second) const {
    if (is_known(first) && is_known(second)) return Status::ok();
    nic_->fault("a post of " + std::to_string(first.size()) + " + " + std::to_string(second.size()) +
                " bytes that are not registered");
    return Status(Code::kTransport, "strict: memory that is not registered");
  }
  bool is_known(StrictNic::Memory memory) const {
    return memory.empty() || (domain_.find(place_, memory) != nullptr && nic_->covers(memory));
  }

  memory::Domain& domain_;
  std::shared_ptr<StrictNic> nic_;
  memory::NicId place_;
};

}  // namespace herring::transport
