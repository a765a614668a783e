#include "bindings/tensorflow/keys.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

namespace herring::tensorflow_binding {
namespace {

/// Names that are made up come again after so many operations: what the runtime remembers of names stays bounded.
constexpr std::uint64_t kUnnamed = 1u << 16;
constexpr std::string_view kPrefix = "tensorflow/";
constexpr std::string_view kUnnamedPrefix = "tensorflow/noname.";

/// Horovod's word for it.
const char* kind_of(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "allreduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kAllGather:
    case Collective::kUnevenAllGather:
      return "allgather";
    case Collective::kAllToAll:
      return "alltoall";
    case Collective::kReduceScatter:
      return "reducescatter";
    default:
      return "operation";
  }
}

}  // namespace

InFlight::InFlight(Keys& keys, Announcement announcement) : keys_(keys), announcement_(std::move(announcement)) {
  const std::lock_guard lock(keys_.mutex_);
  keys_.in_flight_.insert(this);
}

InFlight::~InFlight() {
  const std::lock_guard lock(keys_.mutex_);
  keys_.in_flight_.erase(this);
}

Announcement Keys::take(std::uint32_t group, Collective collective, const std::string& name) {
  Announcement taken;
  taken.group = group;
  taken.collective = collective;
  const std::lock_guard lock(mutex_);
  if (name.empty()) {
    const std::uint64_t number = unnamed_[group]++;
    taken.key = std::string(kUnnamedPrefix) + std::to_string(number % kUnnamed);
    taken.use = uses_[group][taken.key] = number / kUnnamed + 1;
  } else {
    taken.key = std::string(kPrefix) + kind_of(collective) + "." + name;
    taken.use = ++uses_[group][taken.key];
  }
  return taken;
}

void Keys::announce(const Announcement& announcement) const {
  Tell listener = nullptr;
  {
    const std::lock_guard lock(mutex_);
    listener = listener_;
  }
  if (listener == nullptr) return;
  const bool goes_on = announcement.collective == Collective::kAllReduce;
  const std::string reduce(goes_on ? name(announcement.reduce) : "");
  const std::string dtype(goes_on ? name(announcement.dtype) : "");
  listener(announcement.group, announcement.key.c_str(), kind_of(announcement.collective), announcement.use,
           reduce.c_str(), dtype.c_str(), announcement.shape.data(),
           static_cast<std::int32_t>(announcement.shape.size()));
}

void Keys::listen(Tell listener) {
  std::vector<Announcement> now;
  {
    const std::lock_guard lock(mutex_);
    listener_ = listener;
    if (listener == nullptr) return;
    for (const InFlight* operation : in_flight_) now.push_back(operation->announcement());
  }
  for (const Announcement& announcement : now) announce(announcement);
}

std::vector<Keys::Use> Keys::uses() const {
  const std::lock_guard lock(mutex_);
  std::vector<Use> all;
  for (const auto& [group, keys] : uses_) {
    for (const auto& [key, use] : keys) all.push_back({group, key, use});
  }
  return all;
}

void Keys::learn(std::uint32_t group, const std::string& key, std::uint64_t use) {
  const std::lock_guard lock(mutex_);
  std::uint64_t& known = uses_[group][key];
  known = std::max(known, use);
  if (!key.starts_with(kUnnamedPrefix) || use == 0) return;
  std::uint64_t number = 0;
  const char* const end = key.data() + key.size();
  if (std::from_chars(key.data() + kUnnamedPrefix.size(), end, number).ec != std::errc()) return;
  unnamed_[group] = std::max(unnamed_[group], (use - 1) * kUnnamed + number + 1);
}

void Keys::clear() {
  const std::lock_guard lock(mutex_);
  uses_.clear();
  unnamed_.clear();
  listener_ = nullptr;
}

}  // namespace herring::tensorflow_binding
