#pragma once

#include <cstddef>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "runtime/link_watch.h"
#include "runtime/post_table.h"
#include "runtime/pump.h"
#include "transport/transport.h"
#include "wire/header.h"

namespace herring::runtime {

using PumpPeers = std::unordered_map<PeerId, PumpPeer>;

/// Asks peers whether the link to them works, and answers those who ask: Ping and Pong, of which the engine hears
/// nothing, and which wait behind nothing of its own. When to ask whom is LinkWatch's. All is borrowed.
class LinkQuestions final {
 public:
  LinkQuestions(transport::Endpoint& endpoint, PostTable& posts, PumpPeers& peers, const PumpLinks& links);

  /// A control message came from the peer. True where it is a Ping or a Pong of one who may send them.
  bool take(Instant now, PumpPeer& peer, const wire::Header& header);
  /// Anything else came from the peer.
  void hear(Instant now, PumpPeer& peer, const wire::Header& header) const {
    if (header.job_id == links_.job_id) peer.heard = now;
  }
  /// Those whose answer waits for room.
  void answer();
  bool owes_answers() const { return !late_.empty(); }
  /// A post of a Ping or a Pong is done.
  void completed(std::size_t index);

  bool is_due(Instant now) const { return watch_.is_due(now); }
  /// While something is awaited; Instant::max() where nobody is ever asked.
  Instant next_look() const;
  void look(Instant now, std::span<const PeerId> awaited);
  void forget(PeerId peer) { watch_.forget(peer); }

 private:
  Status post(PeerId to, PostKind kind);

  transport::Endpoint& endpoint_;
  PostTable& posts_;
  PumpPeers& peers_;
  const PumpLinks& links_;
  LinkWatch watch_;
  std::vector<PeerId> late_;  // To whom a Pong is owed and may go.
};

}  // namespace herring::runtime
