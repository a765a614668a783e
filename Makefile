# make demo, make test, make check: each sets up what it needs (.ci/setup) and ends by saying what happened.
VENV ?= .venv
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 30
SIM_SEEDS ?= 100000
CHAOS_ROUNDS ?= 200
CHAOS_SEED ?= 1
SOAK_MINUTES ?= 10
# Whose tests make asan builds and runs: folders of tests/, as "tcp wire"; all where it is empty.
ASAN_FOLDERS ?=
WHEELS ?=
TENSORFLOW_RELEASES ?= 2.21.0
TORCH_RELEASES ?= 2.9.1 2.12.0 2.15.0
RUN = $(VENV)/bin/python
PATH_IN_VENV = PATH="$(abspath $(VENV))/bin:$$PATH"
# Where setup.py builds the package. Known once there is a virtual environment.
BUILD = $(shell $(RUN) -c 'import sys, sysconfig; print(f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/cmake")')
CMAKE = $(PATH_IN_VENV) cmake -S . -G Ninja -DHERRING_TESTS=ON
TESTS = $(PATH_IN_VENV) VENV="$(abspath $(VENV))" JOBS=$(JOBS) .ci/test

.PHONY: help demo test check check-fast asan asan-build asan-tensorflow tsan fuzz fuzz-build sim chaos soak ecosystem conformance torch-releases test-tensorflow install-tensorflow test-tensorflow-long setup setup-tests build-tests cpp-tests test-install test-ssh test-slurm test-kubernetes test-sagemaker test-ray test-skypilot test-spark test-aarch64 wheels format tidy doctor docs clean

help:
	@echo "make demo    set up, then train two real models through Herring and compare with one process"
	@echo "make test    set up, then run all tests"
	@echo "make test-install  pip install from the checkout and from the sdist, each into a bare environment"
	@echo "make wheels  a wheel for this Python in dist/, tried where there is no compiler (WHEELS=\"--pythons python3.12 python3.13 --torch 2.12.0 --aarch64\")"
	@echo "make test-aarch64  cross-compiles for aarch64 and runs the C++ tests of computation under qemu-user"
	@echo "make test-ssh  herringrun over emulated hosts with a real sshd each (root; installs openssh-server)"
	@echo "make test-slurm  jobs of a real Slurm on four emulated hosts (root; installs slurmctld, slurmd, slurm-client, munge)"
	@echo "make test-kubernetes  the manifests of herring kubernetes: published schemas, and played on emulated hosts"
	@echo "make test-sagemaker  a SageMaker job on four emulated hosts with SageMaker's own SDK (root; 1.1 GB)"
	@echo "make test-ray         Ray Train on a real Ray cluster of one machine (its own environment in build/ray)"
	@echo "make test-spark  Spark's TorchDistributor on a real Spark of one machine (its own environment in build/spark, 1.7 GB; Java)"
	@echo "make test-skypilot  SkyPilot itself reads examples/skypilot/train.yaml (its own environment in build/skypilot, 460 MB)"
	@echo "make check   format, lint, types, build with warnings as errors, tests"
	@echo "make tidy    clang-tidy over csrc/ by .clang-tidy (FILES=\"csrc/tcp/send.cc\": these alone)"
	@echo "make asan    the C++ tests under AddressSanitizer and UBSan (ASAN_FOLDERS=\"tcp wire\": these alone);  make tsan: under ThreadSanitizer"
	@echo "make fuzz    libFuzzer over every decoder (FUZZ_SECONDS=$(FUZZ_SECONDS) each)"
	@echo "make sim     SIM_SEEDS=$(SIM_SEEDS) seeded schedules of engines, messages and elastic jobs under virtual time"
	@echo "make chaos   CHAOS_ROUNDS=$(CHAOS_ROUNDS) jobs with processes killed, stopped, cut off (as root: on emulated hosts)"
	@echo "make soak    steps at speed for SOAK_MINUTES=$(SOAK_MINUTES); memory and descriptors must stay flat"
	@echo "make ecosystem  install Accelerate, Transformers and Lightning, and train with each on Herring"
	@echo "make conformance  torch's own distributed tests on herring beside gloo; writes docs/conformance.md"
	@echo "make torch-releases  tests/torch on each of TORCH_RELEASES ($(TORCH_RELEASES)), each in its own environment"
	@echo "make test-tensorflow  tests/tensorflow on each of TENSORFLOW_RELEASES ($(TENSORFLOW_RELEASES)), each in its own environment"
	@echo "make asan-tensorflow  ranks of TensorFlow, on the CPU and on a fake GPU, with Herring under AddressSanitizer and UBSan"
	@echo "make test-tensorflow-long  the same, and what takes longer"
	@echo "make docs    builds the documentation site into build/docs; a broken link or a name without a docstring is an error"
	@echo "make doctor  what this machine has and what Herring would choose"
	@echo "make setup   a virtual environment in $(VENV) with Herring installed"

setup:
	@VENV="$(VENV)" .ci/setup

setup-tests:
	@VENV="$(VENV)" .ci/setup --tests

demo: setup
	@$(PATH_IN_VENV) $(RUN) examples/demo.py

doctor: setup
	@$(RUN) -m herring._cli doctor

build-tests: setup-tests
	@$(CMAKE) -B $(BUILD) >/dev/null
	@$(PATH_IN_VENV) ninja -C $(BUILD) -j $(JOBS) --quiet

cpp-tests: build-tests
	@$(TESTS) "C++ tests" $(BUILD)

test: build-tests
	@$(TESTS) test $(BUILD) tests

test-install: setup-tests
	@$(PATH_IN_VENV) $(RUN) .ci/test_install.py

test-aarch64: setup-tests
	@$(PATH_IN_VENV) JOBS=$(JOBS) .ci/test-aarch64

wheels: setup
	@$(PATH_IN_VENV) $(RUN) .ci/wheels.py $(WHEELS)

test-ssh: setup-tests
	@PYTHON="$(RUN)" .ci/test-ssh

test-slurm: setup-tests
	@PYTHON="$(RUN)" .ci/test-slurm

test-kubernetes: setup-tests
	@PYTHON="$(RUN)" .ci/test-kubernetes

test-sagemaker: setup
	@PYTHON="$(RUN)" .ci/test-sagemaker

test-spark: setup
	@PYTHON="$(RUN)" .ci/test-spark

test-skypilot:
	@.ci/test-skypilot

test-ray: setup
	@PYTHON="$(RUN)" .ci/test-ray

check-fast: setup-tests
	@$(PATH_IN_VENV) ruff check herring tests examples benchmarks setup.py _herring_autoload.py
	@$(PATH_IN_VENV) ruff format --check herring tests examples benchmarks setup.py _herring_autoload.py
	@$(PATH_IN_VENV) mypy --strict herring
	@git ls-files '*.h' '*.cc' | xargs clang-format --dry-run --Werror
	@$(RUN) -m herring._configuration_doc --check docs/configuration.md
	@echo "check: OK: format, lint, types, generated documents"

check: check-fast test
	@echo "check: OK"

tidy: setup-tests
	@CMAKE="cmake -S . -G Ninja" PYTHON="$(RUN)" JOBS=$(JOBS) $(PATH_IN_VENV) .ci/tidy $(FILES)

asan-build: setup-tests
	@$(CMAKE) -B build/asan -DHERRING_SANITIZE=address -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" >/dev/null
	@$(PATH_IN_VENV) ninja -C build/asan -j $(JOBS) --quiet $(ASAN_FOLDERS:%=test_%)

asan-tensorflow: setup
	@CMAKE="cmake -S . -G Ninja" PYTHON="$(abspath $(RUN))" JOBS=$(JOBS) $(PATH_IN_VENV) .ci/asan-tensorflow $(lastword $(TENSORFLOW_RELEASES))

asan: asan-build
	@HERRING_TEST_MOST_SCHEDULES=2000 CPP_FOLDERS="$(ASAN_FOLDERS)" $(TESTS) asan build/asan

tsan: setup-tests
	@$(CMAKE) -B build/tsan -DHERRING_SANITIZE=thread -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" >/dev/null
	@$(PATH_IN_VENV) ninja -C build/tsan -j $(JOBS) --quiet
	@HERRING_TEST_MOST_SCHEDULES=2000 $(TESTS) tsan build/tsan

fuzz-build: setup-tests
	@$(PATH_IN_VENV) FUZZ_JOBS=$(JOBS) tests/fuzz/run.sh build

fuzz: setup-tests
	@$(PATH_IN_VENV) FUZZ_JOBS=$(JOBS) tests/fuzz/run.sh $(FUZZ_SECONDS)

sim: build-tests
	@$(PATH_IN_VENV) $(RUN) benchmarks/sim.py --build $(BUILD) --seeds $(SIM_SEEDS) --jobs $(JOBS)

chaos: setup
	@$(PATH_IN_VENV) $(RUN) benchmarks/chaos.py --rounds $(CHAOS_ROUNDS) --seed $(CHAOS_SEED) --jobs $(JOBS)

soak: setup
	@$(PATH_IN_VENV) $(RUN) benchmarks/soak.py --minutes $(SOAK_MINUTES)

ecosystem: setup-tests
	@$(RUN) -m pip install --quiet --disable-pip-version-check -r .ci/requirements-ecosystem.txt
	@$(PATH_IN_VENV) $(RUN) -m pytest tests/ecosystem

conformance: setup-tests
	@$(PATH_IN_VENV) $(RUN) tests/conformance/run.py --jobs $(JOBS) --write docs/conformance.md

test-tensorflow: setup
	@PYTHON="$(RUN)" .ci/test-tensorflow $(TENSORFLOW_RELEASES)

install-tensorflow: setup
	@PYTHON="$(RUN)" .ci/test-tensorflow --install $(TENSORFLOW_RELEASES)

test-tensorflow-long: setup
	@TENSORFLOW_LONG=1 PYTHON="$(RUN)" .ci/test-tensorflow $(TENSORFLOW_RELEASES)

torch-releases: setup
	@PYTHON="$(RUN)" .ci/torch-releases $(TORCH_RELEASES)

docs: setup
	@$(RUN) -m herring._configuration_doc --write docs/configuration.md
	@PYTHON="$(RUN)" .ci/docs

format: setup-tests
	@git ls-files '*.h' '*.cc' | xargs clang-format -i
	@$(PATH_IN_VENV) ruff format herring tests examples benchmarks setup.py _herring_autoload.py

clean:
	rm -rf build
