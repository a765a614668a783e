#include "runtime/routed_endpoint.h"

#include <utility>

namespace herring::runtime {

RoutedEndpoint::RoutedEndpoint(std::unique_ptr<transport::Endpoint> near, std::set<PeerId> near_peers,
                               std::unique_ptr<transport::Endpoint> far)
    : near_(std::move(near)), far_(std::move(far)), near_peers_(std::move(near_peers)) {}

void RoutedEndpoint::add_peer(PeerId peer, std::span<const std::byte> address) {
  if (!is_near(peer)) far_->add_peer(peer, address);
}

void RoutedEndpoint::remove_peer(PeerId peer) { (is_near(peer) ? *near_ : *far_).remove_peer(peer); }

Status RoutedEndpoint::post_send(PeerId to, Tag tag, std::span<const std::byte> first,
                                 std::span<const std::byte> second, Token token) {
  return (is_near(to) ? *near_ : *far_).post_send(to, tag, first, second, token);
}

Status RoutedEndpoint::post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) {
  return far_->post_receive(tag, first, second, token);
}

Status RoutedEndpoint::post_receive_from(PeerId from, Tag tag, std::span<std::byte> first, std::span<std::byte> second,
                                         Token token) {
  if (!is_near(from)) return far_->post_receive_from(from, tag, first, second, token);
  const Status status = near_->post_receive(tag, first, second, token);
  if (status.is_ok()) near_receives_.insert(token.value);
  return status;
}

Status RoutedEndpoint::post_loan_receive(PeerId from, Tag tag, std::span<std::byte> first, Token token) {
  if (!is_near(from)) return far_->post_loan_receive(from, tag, first, token);
  const Status status = near_->post_loan_receive(from, tag, first, token);
  if (status.is_ok()) near_receives_.insert(token.value);
  return status;
}

void RoutedEndpoint::cancel_receive(Token token) {
  (near_receives_.contains(token.value) ? *near_ : *far_).cancel_receive(token);
}

std::size_t RoutedEndpoint::poll(std::span<transport::Completion> completions) {
  // Half of the room at most, where there is more than one place: neither side keeps the other waiting.
  const std::size_t near_share = (completions.size() + 1) / 2;
  const std::size_t count = near_->poll(completions.first(near_share));
  for (std::size_t i = 0; i < count; ++i) {
    if (completions[i].kind != transport::CompletionKind::kSend) near_receives_.erase(completions[i].token.value);
  }
  return count + far_->poll(completions.subspan(count));
}

void RoutedEndpoint::wait(Instant deadline, std::span<const int> also) {
  std::vector<int> descriptors(also.begin(), also.end());
  if (near_->prepare_wait(descriptors, deadline)) far_->wait(deadline, descriptors);
}

bool RoutedEndpoint::prepare_wait(std::vector<int>& descriptors, Instant& deadline) {
  return near_->prepare_wait(descriptors, deadline) && far_->prepare_wait(descriptors, deadline);
}

void RoutedEndpoint::shut_down() {
  near_->shut_down();
  far_->shut_down();
  near_receives_.clear();
}

}  // namespace herring::runtime
