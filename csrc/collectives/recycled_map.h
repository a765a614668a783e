#pragma once

#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

namespace herring::collectives {

/// A map whose entries come and go by the thousand in each step: it keeps their memory for the next ones, for malloc
/// would take a third of what a small tensor costs. One thread at a time.
template <class Key, class Value>
class RecycledMap final {
 public:
  using Map = std::unordered_map<Key, Value>;
  using iterator = typename Map::iterator;

  iterator find(const Key& key) { return map_.find(key); }
  typename Map::const_iterator find(const Key& key) const { return map_.find(key); }
  Value& at(const Key& key) { return map_.at(key); }
  const Value& at(const Key& key) const { return map_.at(key); }
  iterator end() { return map_.end(); }
  typename Map::const_iterator end() const { return map_.end(); }

  /// The key is new.
  void add(const Key& key, Value value) {
    if (spare_.empty()) {
      map_.emplace(key, std::move(value));
      return;
    }
    typename Map::node_type node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = key;
    node.mapped() = std::move(value);
    map_.insert(std::move(node));
  }
  Value take(iterator entry) {
    typename Map::node_type node = map_.extract(entry);
    Value value = std::exchange(node.mapped(), Value());
    if (spare_.size() < kMostSpare) spare_.push_back(std::move(node));
    return value;
  }

 private:
  static constexpr std::size_t kMostSpare = 4096;

  Map map_;
  std::vector<typename Map::node_type> spare_;
};

}  // namespace herring::collectives
