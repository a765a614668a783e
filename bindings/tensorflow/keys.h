#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/types.h"

/// Operations that ranks find by their keys (Horovod's): how often each key was used, and which are in flight. A rank
/// that has joined takes part in them without data, so somebody has to tell it of them.
namespace herring::tensorflow_binding {

/// One operation, as a rank that has joined must know it.
struct Announcement {
  std::uint32_t group = 0;
  std::string key;        ///< "tensorflow/allreduce.loss", "tensorflow/noname.3"
  std::uint64_t use = 0;  ///< How often the key has been used, this time included.
  Collective collective = Collective::kAllReduce;
  ReduceOp reduce = ReduceOp::kSum;
  DataType dtype = DataType::kFloat32;
  std::vector<std::int64_t> shape;
};

/// Called with each announcement; all pointers are borrowed until it returns. `reduce` and `dtype` are empty where the
/// operation cannot go on without the rank's data.
using Tell = void (*)(std::uint32_t group, const char* key, const char* kind, std::uint64_t use, const char* reduce,
                      const char* dtype, const std::int64_t* shape, std::int32_t dims);

class Keys;

/// An operation in flight, until this goes.
class InFlight final {
 public:
  InFlight(Keys& keys, Announcement announcement);
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  const Announcement& announcement() const { return announcement_; }
  /// What the runtime matches ranks by.
  std::string wire_name() const { return "hvd/" + announcement_.key; }

 private:
  Keys& keys_;
  Announcement announcement_;
};

/// Safe from any thread.
class Keys final {
 public:
  /// Of one more use of this name; "": the next of those that have none.
  Announcement take(std::uint32_t group, Collective collective, const std::string& name);
  /// Tells whoever listens of it. Not with a lock held: that side has locks of its own.
  void announce(const Announcement& announcement) const;

  /// Null ends it. Else: called for what is in flight now, and for all that starts from now on.
  void listen(Tell listener);
  /// How often each key has been used.
  struct Use {
    std::uint32_t group;
    std::string key;
    std::uint64_t use;
  };
  std::vector<Use> uses() const;
  /// The key has been used so often, by whom it may be.
  void learn(std::uint32_t group, const std::string& key, std::uint64_t use);
  /// As at the start.
  void clear();

 private:
  friend class InFlight;

  mutable std::mutex mutex_;
  std::unordered_map<std::uint32_t, std::unordered_map<std::string, std::uint64_t>> uses_;
  std::unordered_map<std::uint32_t, std::uint64_t> unnamed_;  ///< By group: operations without a name so far.
  std::unordered_set<const InFlight*> in_flight_;
  Tell listener_ = nullptr;
};

}  // namespace herring::tensorflow_binding
