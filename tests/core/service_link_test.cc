#include "core/service_link.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/status.h"

namespace herring {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

/// As Kubernetes writes them: a service "herring" with a named and a second port, "herring-server" with IPv6.
const Pairs kLinks = {
    {"HERRING_SERVICE_HOST", "10.96.0.17"},
    {"HERRING_SERVICE_PORT", "80"},
    {"HERRING_SERVICE_PORT_HTTP", "80"},
    {"HERRING_SERVICE_PORT_METRICS_2", "9090"},
    {"HERRING_PORT", "tcp://10.96.0.17:80"},
    {"HERRING_PORT_80_TCP", "tcp://10.96.0.17:80"},
    {"HERRING_PORT_80_TCP_PROTO", "tcp"},
    {"HERRING_PORT_80_TCP_PORT", "80"},
    {"HERRING_PORT_80_TCP_ADDR", "10.96.0.17"},
    {"HERRING_PORT_53_UDP", "udp://10.96.0.17:53"},
    {"HERRING_PORT_53_UDP_PROTO", "udp"},
    {"HERRING_SERVER_SERVICE_HOST", "fd00::17"},
    {"HERRING_SERVER_SERVICE_PORT", "443"},
    {"HERRING_SERVER_PORT", "tcp://[fd00::17]:443"},
    {"HERRING_SERVER_PORT_443_TCP", "tcp://[fd00::17]:443"},
    {"HERRING_SERVER_PORT_443_TCP_PROTO", "tcp"},
    {"HERRING_SERVER_PORT_443_TCP_PORT", "443"},
    {"HERRING_SERVER_PORT_443_TCP_ADDR", "fd00::17"},
};

TEST(ServiceLink, WhatKubernetesSetsForAServiceOfThatNameEndsNoJob) {
  for (const auto& [name, value] : kLinks) EXPECT_TRUE(is_service_link(name, value)) << name << '=' << value;
  Pairs environment = kLinks;
  environment.emplace_back("HERRING_LANES", "3");
  const ConfigResult result = read_config(environment);
  EXPECT_EQ(result.config.lanes, 3u);
  ASSERT_EQ(result.ignored.size(), kLinks.size());
  EXPECT_EQ(result.ignored.front(), "HERRING_SERVICE_HOST");
}

TEST(ServiceLink, EverythingElseStaysAnError) {
  const Pairs others = {
      {"HERRING_PORT", "29500"},
      {"HERRING_PORT", "tcp://somewhere:80"},
      {"HERRING_PORT", "http://10.0.0.1:80"},
      {"HERRING_PORT", "tcp://10.0.0.1"},
      {"HERRING_PORT", "tcp://10.0.0.1:0"},
      {"HERRING_PORT", "://:"},
      {"HERRING_PORT", ""},
      {"HERRING_SERVICE_HOST", "host1"},
      {"HERRING_SERVICE_HOST", ""},
      {"HERRING_SERVICE_PORT", "65536"},
      {"HERRING_SERVICE_PORT", "http"},
      {"HERRING_SERVICE_PORT_", "80"},
      {"HERRING_SERVICE", "10.0.0.1"},
      {"HERRING_HOST", "10.0.0.1"},
      {"HERRING_PORT_80_TCP", "tcp://10.0.0.1:81"},
      {"HERRING_PORT_80_TCP", "udp://10.0.0.1:80"},
      {"HERRING_PORT_80_TCP_PORT", "81"},
      {"HERRING_PORT_80_TCP_PROTO", "udp"},
      {"HERRING_PORT_80_TCP_ADDR", "x"},
      {"HERRING_PORT_80_TCP_HOST", "10.0.0.1"},
      {"HERRING_PORT_X_TCP", "tcp://10.0.0.1:80"},
      {"HERRING_80_TCP", "tcp://10.0.0.1:80"},
      {"HERRING_port", "tcp://10.0.0.1:80"},
      {"HERRING_SEVRERS", "2"},
  };
  for (const auto& other : others) {
    EXPECT_FALSE(is_service_link(other.first, other.second)) << other.first << '=' << other.second;
    EXPECT_THROW(read_config(Pairs{other}), Error) << other.first << '=' << other.second;
  }
  // Nobody passes them as arguments.
  EXPECT_THROW(read_config({}, Pairs{{"HERRING_PORT", "tcp://10.96.0.17:80"}}), Error);
}

}  // namespace
}  // namespace herring
