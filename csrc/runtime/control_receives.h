#pragma once

#include <cstddef>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "runtime/post_table.h"
#include "runtime/pump.h"
#include "transport/transport.h"
#include "wire/header.h"

namespace herring::runtime {

/// The receives that a pump keeps posted on kControlTag, for anybody and for near peers. An index is that of the
/// receive's post.
class ControlReceives final {
 public:
  /// Throws Error where there is no memory for them.
  ControlReceives(transport::Endpoint& endpoint, PostTable& posts, const PumpOptions& options)
      : endpoint_(endpoint), posts_(posts) {
    for (std::size_t i = 0; i < options.control_receives; ++i) waiting_.push_back(add(kAnyPeer));
    for (const NearPeer& near : options.near) {
      for (std::size_t i = 0; i < near.control_receives; ++i) waiting_.push_back(add(near.peer));
    }
    post();
  }

  /// Those that wait for room.
  void post() {
    while (!waiting_.empty()) {
      const std::size_t index = waiting_.back();
      const Post& post = posts_[index];
      const Status status = endpoint_.post_receive_from(post.from, kControlTag, post.buffer, {}, Token{index});
      if (!status.is_ok()) return;  // Again with the next step; a broken endpoint shows in the engine's deadlines.
      waiting_.pop_back();
      ++posted_;
    }
  }

  /// The endpoint is done with one.
  void completed() { --posted_; }
  /// It is read, and can be posted again.
  void repost(std::size_t index) {
    waiting_.push_back(index);
    post();
  }
  /// The engine keeps its buffer until it releases it; another one is posted for the same peers. Throws Error where
  /// there is no memory for that.
  void replace(std::size_t kept) { repost(add(posts_[kept].from)); }
  void release(std::size_t kept) { spares_.push_back(kept); }

  bool has_waiting() const { return !waiting_.empty(); }
  std::size_t posted() const { return posted_; }
  std::size_t all() const { return all_; }  ///< Also those that the engine keeps, and the spare ones.

 private:
  std::size_t add(PeerId from) {
    std::size_t index = 0;
    if (spares_.empty()) {
      index = posts_.add(PostKind::kControl, true).value();
      ++all_;
    } else {
      index = spares_.back();
      spares_.pop_back();
    }
    posts_[index].from = from;
    return index;
  }

  transport::Endpoint& endpoint_;
  PostTable& posts_;
  std::vector<std::size_t> waiting_;  // For room.
  std::vector<std::size_t> spares_;   // That the engine has kept and released.
  std::size_t all_ = 0;
  std::size_t posted_ = 0;
};

}  // namespace herring::runtime
