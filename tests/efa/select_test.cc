#include "efa/select.h"

#include <gtest/gtest.h>

#include "efa/fabric_under_test.h"

namespace herring::efa {
namespace {

Candidate tcp(const std::string& domain, const std::string& address) {
  Candidate candidate;
  candidate.kind = ProviderKind::kTcp;
  candidate.domain = domain;
  candidate.address = address;
  candidate.interface.loopback = domain == "lo";
  candidate.ipv6 = address.find(':') != std::string::npos;
  candidate.link_local = address.starts_with("fe80");
  return candidate;
}

Candidate efa_device() {
  Candidate candidate;
  candidate.kind = ProviderKind::kEfa;
  candidate.domain = "rdmap0s6-rdm";
  return candidate;
}

int pick(const std::vector<Candidate>& candidates, const std::string& provider = "auto",
         const std::string& interface = "") {
  FabricOptions options;
  options.provider = provider;
  options.interface = interface;
  std::vector<std::string> reasons;
  const int chosen = choose(candidates, options, reasons);
  EXPECT_EQ(reasons.size(), candidates.size());
  for (const std::string& reason : reasons) EXPECT_FALSE(reason.empty());
  return chosen;
}

TEST(Choose, TakesEfaThenVerbsThenTcp) {
  Candidate verbs;
  verbs.kind = ProviderKind::kVerbs;
  verbs.domain = "mlx5_0";
  const auto eth = tcp("eth0", "10.0.0.1");
  EXPECT_EQ(pick({eth, verbs, efa_device()}), 2);
  EXPECT_EQ(pick({eth, verbs}), 1);
  EXPECT_EQ(pick({eth}), 0);
  EXPECT_EQ(pick({eth, verbs, efa_device()}, "tcp"), 0);
  EXPECT_EQ(pick({eth, verbs}, "efa"), -1);
  EXPECT_EQ(pick({}), -1);
}

TEST(Choose, PrefersAnInterfaceThatOtherHostsCanReach) {
  auto down = tcp("eth1", "10.0.0.2");
  down.interface.up = false;
  auto bridge = tcp("docker0", "172.17.0.1");
  bridge.interface.local_only = true;
  auto routed = tcp("eth2", "10.0.0.3");
  routed.interface.default_route = true;
  const auto lo = tcp("lo", "127.0.0.1"), plain = tcp("eth0", "10.0.0.1"), v6 = tcp("eth0", "fd00::2"),
             local = tcp("eth0", "fe80::1");
  EXPECT_EQ(pick({lo, local, v6, plain}), 3);
  EXPECT_EQ(pick({lo, bridge, plain}), 2);
  EXPECT_EQ(pick({plain, routed}), 1);
  EXPECT_EQ(pick({lo, v6}), 1);
  EXPECT_EQ(pick({lo, down, local}), 0);
  EXPECT_EQ(pick({down}), -1);
}

TEST(Choose, AnInterfaceIsNamedByNameOrAddress) {
  const std::vector<Candidate> all{tcp("eth0", "10.0.0.1"), tcp("eth0", "fd00::2"), tcp("lo", "127.0.0.1"),
                                   tcp("lo", "::1"), efa_device()};
  EXPECT_EQ(pick(all, "auto", "lo"), 2);
  EXPECT_EQ(pick(all, "auto", "::1"), 3);
  EXPECT_EQ(pick(all, "auto", "fd00::2"), 1);
  EXPECT_EQ(pick(all, "auto", "eth0"), 0);
  EXPECT_EQ(pick(all, "auto", "rdmap0s6"), 4);
  EXPECT_EQ(pick(all, "auto", "eth9"), -1);
}

TEST(Choose, PrefersTheProviderWithoutALayerBetween) {
  auto layered = tcp("eth0", "10.0.0.1"), net = layered;
  layered.kind = ProviderKind::kTcpOverRxm;
  net.kind = ProviderKind::kNet;
  EXPECT_EQ(pick({layered, tcp("eth0", "10.0.0.1"), net}), 1);
  EXPECT_EQ(pick({layered, net}), 1);
  EXPECT_EQ(pick({layered}), 0);
}

TEST(Choose, LeavesOutWhatCannotCarryOurMessages) {
  auto broken = efa_device();
  broken.problem = "takes fewer than 2 buffers in one message";
  EXPECT_EQ(pick({broken, tcp("eth0", "10.0.0.1")}), 1);
}

TEST(Choose, RefusesAnUnknownProviderByName) {
  FabricOptions options;
  options.provider = "infiniband";
  std::vector<std::string> reasons;
  try {
    choose({}, options, reasons);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kInvalidArgument);
    EXPECT_NE(error.status().message().find("infiniband"), std::string::npos);
    EXPECT_NE(error.status().message().find("verbs"), std::string::npos);
  }
}

TEST(Choose, ProcessesOfAHostTakeDifferentEfaDevicesAndNothingElse) {
  std::vector<Candidate> candidates = {efa_device(), tcp("eth0", "10.0.0.1"), efa_device(), efa_device()};
  candidates[2].domain = "rdmap16s6-rdm";
  candidates[3].domain = "rdmap32s6-rdm";
  candidates[3].problem = "its largest message is 1 byte";
  const auto picked = [&candidates](std::uint32_t number, const std::string& provider, const std::string& interface) {
    FabricOptions options;
    options.number = number;
    options.provider = provider;
    options.interface = interface;
    std::vector<std::string> reasons;
    return choose(candidates, options, reasons);
  };
  EXPECT_EQ(picked(0, "auto", ""), 0);
  EXPECT_EQ(picked(1, "auto", ""), 2);
  EXPECT_EQ(picked(2, "auto", ""), 0);
  EXPECT_EQ(picked(1, "auto", "rdmap0s6"), 0) << "named";
  EXPECT_EQ(picked(1, "tcp", ""), 1);
  candidates[0].kind = candidates[2].kind = ProviderKind::kVerbs;
  EXPECT_EQ(picked(1, "auto", ""), 0) << "they may be on different networks";
}

TEST(Choose, ProcessesTakeEfaDevicesOfTheirOwnNode) {
  std::vector<Candidate> candidates = {efa_device(), efa_device(), tcp("eth0", "10.0.0.1"), efa_device(), efa_device()};
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (i != 2) candidates[i].domain += std::to_string(i);
    candidates[i].node = i < 2 ? 0 : 1;
  }
  const auto picked = [&candidates](std::uint32_t self, std::uint32_t number) {
    FabricOptions options;
    options.cards.users = {{0b10, 2}, {0b01, 2}};
    options.cards.self = self;
    options.number = number;
    std::vector<std::string> reasons;
    return choose(candidates, options, reasons);
  };
  EXPECT_EQ(picked(0, 0), 3);
  EXPECT_EQ(picked(0, 1), 4);
  EXPECT_EQ(picked(0, 2), 3);
  EXPECT_EQ(picked(1, 0), 0);
  EXPECT_EQ(picked(1, 1), 1);
}

TEST(Probe, ReportsWhatItTriedWhereThereIsNothing) {
  FabricOptions options;
  options.library = "/nonexistent/libfabric.so.1";
  const FabricReport report = probe(options);
  EXPECT_EQ(report.path, "");
  EXPECT_EQ(report.chosen, -1);
  ASSERT_EQ(report.tried.size(), 1u);
  EXPECT_TRUE(report.tried[0].starts_with("/nonexistent/libfabric.so.1: "));
  EXPECT_EQ(report.tried[0].rfind("/nonexistent"), 0u) << "named once: " << report.tried[0];
  try {
    memory::Domain domain;
    Fabric fabric(options, domain);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kUnavailable);
    EXPECT_NE(std::string(error.what()).find("/nonexistent/libfabric.so.1"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("HERRING_LIBFABRIC"), std::string::npos);
  }
}

TEST(Probe, RefusesALibraryThatIsNotLibfabric) {
  FabricOptions options;
  options.library = "libm.so.6";
  const FabricReport report = probe(options);
  EXPECT_EQ(report.path, "");
  ASSERT_EQ(report.tried.size(), 1u);
  EXPECT_NE(report.tried[0].find("not libfabric"), std::string::npos) << report.tried[0];
}

TEST(Probe, ListsProvidersAndSaysWhyOneWasChosen) {
  const FabricReport report = probe(options_under_test());
  if (report.path.empty()) GTEST_SKIP() << "no libfabric here";
  EXPECT_FALSE(report.version.empty());
  ASSERT_GE(report.chosen, 0);
  const ProviderReport& chosen = report.providers[static_cast<std::size_t>(report.chosen)];
  EXPECT_TRUE(chosen.usable);
  EXPECT_NE(chosen.reason.find("chosen"), std::string::npos);
  EXPECT_NE(chosen.domain.find("lo"), std::string::npos);
  for (const ProviderReport& provider : report.providers) {
    EXPECT_FALSE(provider.reason.empty());
    std::cout << provider.name << ' ' << provider.domain << ": " << provider.reason << '\n';
  }
}

TEST(Probe, NeverThrowsAndAFabricSaysWhatIsThere) {
  FabricOptions options = options_under_test();
  options.interface = "nosuchif0";
  const FabricReport report = probe(options);
  if (report.path.empty()) GTEST_SKIP() << "no libfabric here";
  EXPECT_EQ(report.chosen, -1);
  try {
    memory::Domain domain;
    Fabric fabric(options, domain);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kUnavailable);
    EXPECT_NE(std::string(error.what()).find("nosuchif0"), std::string::npos) << error.what();
  }
  options.provider = "nonsense";
  EXPECT_EQ(probe(options).chosen, -1);
}

}  // namespace
}  // namespace herring::efa
