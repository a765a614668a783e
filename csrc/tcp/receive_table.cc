#include "tcp/receive_table.h"

#include <utility>

namespace herring::tcp {

Receive* ReceiveTable::add(Tag tag, const TwoSpans<std::byte>& memory, Token token) {
  if (pool_.taken() >= by_token_.size()) grow();
  Receive* const receive = pool_.take();
  receive->tag = tag;
  receive->token = token;
  receive->memory = memory;
  link_tag(receive);
  Receive*& first = by_token_[bucket(token.value, by_token_.size())];
  receive->next_token = std::exchange(first, receive);
  return receive;
}

/// Where the chain points to the leader of this tag, or to its end.
Receive** ReceiveTable::tag_slot(Tag tag) {
  Receive** slot = &by_tag_[bucket(tag.value, by_tag_.size())];
  while (*slot != nullptr && (*slot)->tag != tag) slot = &(*slot)->next_tag;
  return slot;
}

void ReceiveTable::link_tag(Receive* receive) {
  Receive** const slot = tag_slot(receive->tag);
  Receive* const leader = *slot;
  receive->previous_same = nullptr;
  receive->next_same = leader;
  receive->next_tag = leader == nullptr ? nullptr : leader->next_tag;
  if (leader != nullptr) leader->previous_same = receive;
  *slot = receive;
}

Receive* ReceiveTable::take(Tag tag) {
  Receive* const leader = *tag_slot(tag);
  if (leader != nullptr) unlink_tag(leader);
  return leader;
}

void ReceiveTable::unlink_tag(Receive* receive) {
  Receive* const follower = receive->next_same;
  if (follower != nullptr) follower->previous_same = receive->previous_same;
  if (receive->previous_same != nullptr) {
    receive->previous_same->next_same = follower;
  } else {
    Receive** const slot = tag_slot(receive->tag);
    *slot = follower == nullptr ? receive->next_tag : follower;
    if (follower != nullptr) follower->next_tag = receive->next_tag;
  }
  receive->next_same = receive->previous_same = receive->next_tag = nullptr;
}

Receive* ReceiveTable::find(Token token) {
  Receive* receive = by_token_[bucket(token.value, by_token_.size())];
  while (receive != nullptr && receive->token != token) receive = receive->next_token;
  return receive;
}

void ReceiveTable::remove(Receive* receive) {
  Receive** slot = &by_token_[bucket(receive->token.value, by_token_.size())];
  while (*slot != receive) slot = &(*slot)->next_token;
  *slot = receive->next_token;
  pool_.give_back(receive);
}

void ReceiveTable::grow() {
  const std::size_t buckets = 4 * by_token_.size();
  std::vector<Receive*> tokens(buckets), tags(buckets);
  for (Receive* chain : by_token_) {
    while (chain != nullptr) {
      Receive* const receive = std::exchange(chain, chain->next_token);
      receive->next_token = std::exchange(tokens[bucket(receive->token.value, buckets)], receive);
    }
  }
  for (Receive* chain : by_tag_) {
    while (chain != nullptr) {
      Receive* const leader = std::exchange(chain, chain->next_tag);
      leader->next_tag = std::exchange(tags[bucket(leader->tag.value, buckets)], leader);
    }
  }
  by_token_ = std::move(tokens);
  by_tag_ = std::move(tags);
}

}  // namespace herring::tcp
