# make demo        train a GPT in fp32, bf16 and fp16 on real text and compare them (5 to 6 minutes)
# make test        install what tests need and run what must hold
# make test-unit   the quick tier of it: arithmetic, policies, optimizers, meters, data, checkpoints
# make test-all    every test but the strangers', slow ones included
# make check       lint, format, types, then the tests: what .ci/run does, but for the wheel
# make test-slow   the tests marked slow
# make test-faults FAULTS=200   nightly: runs are killed, stopped, their disks and bits fail; an hour or two
# make test-without-bf16   the tests as a CPU without bf16 instructions runs them
# make test-distributed   all tests with several processes, slow ones included
# make test-strangers   programs nobody here wrote, in an environment of their own (.venv-strangers)
# make site        the site of docs/, into build/site; make serve shows it while it is written
# make lab       run the experiments of lab/, and write the course's figures and pages from them
# make ways        one text classifier trained in every way that tutorials compare; WAYS="--train FILE": on your data
# make catalogue   gather the report page's sentences for translation, and compile them
# make benchmark   the figures of benchmarks/README.md on this machine

VENV ?= .venv
BIN = $(VENV)/bin
WORKERS ?= 2
STRANGERS_VENV ?= .venv-strangers

UNIT = tests/architecture tests/diagnostics tests/forward_kernels tests/golden tests/optim tests/precision \
       tests/properties tests/reference tests/trainer/checkpoint tests/trainer/data tests/test_errors.py tests/test_format_bits.py tests/test_formats.py \
       tests/test_readme.py

# The tests' tensors are small: threads that wait for each other cost more than they give.
test test-unit test-all test-slow test-faults test-strangers test-without-bf16 test-distributed: export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-unit test-all test-slow test-faults test-strangers test-without-bf16 test-distributed lint check wheel site serve lab catalogue ways benchmark clean

demo:
	@VENV=$(VENV) scripts/setup-venv.sh train plot
	@for each in fp32 auto fp16-mixed; do \
	  $(BIN)/halfstep train --max-steps 80 --warmup-steps 5 --precision $$each --output-dir runs/demo-$$each; \
	done; $(BIN)/halfstep report runs/demo-*

test:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python -m pytest -q -m "not slow and not strangers" -n $(WORKERS)

test-unit:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python -m pytest -q -m "not slow" -n $(WORKERS) $(UNIT)

test-all:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python -m pytest -q -m "not strangers" -n $(WORKERS) --timeout 1800

test-slow:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python -m pytest -q -m slow --timeout 1800

test-faults:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python -m tests.faults $(or $(FAULTS),200)

# In an environment of its own, since the packages bring others; their warnings are theirs.
test-strangers: VENV = $(STRANGERS_VENV)
test-strangers:
	@VENV=$(VENV) scripts/setup-venv.sh test strangers
	@$(BIN)/python -m pytest -q -m strangers -n $(WORKERS) -W ignore --timeout 900 tests/strangers

test-without-bf16: export PYTHONPATH := $(CURDIR)/tests/without_bf16$(if $(PYTHONPATH),:$(PYTHONPATH))
test-without-bf16: export ONEDNN_MAX_CPU_ISA = AVX2
test-without-bf16: export ATEN_CPU_CAPABILITY = avx2
test-without-bf16:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python -m pytest -q -m "not slow and not strangers" -n $(WORKERS)

test-distributed:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python -m pytest -q -m distributed --timeout 1800

lint:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

check: lint test

wheel:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python scripts/check_wheel.py

site:
	@VENV=$(VENV) scripts/setup-venv.sh docs
	@$(BIN)/mkdocs build

serve:
	@VENV=$(VENV) scripts/setup-venv.sh docs
	@$(BIN)/mkdocs serve --watch docs --watch src/halfstep

benchmark:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python benchmarks/train_cpu.py

lab:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@for script in $(filter-out lab/course.py,$(wildcard lab/*.py)); do $(BIN)/python $$script --out docs/figures/lab || exit 1; done
	@$(BIN)/python scripts/lab_page.py

catalogue:
	@$(BIN)/python scripts/catalogue.py

ways:
	@VENV=$(VENV) scripts/setup-venv.sh test
	@$(BIN)/python benchmarks/classify_methods.py --nine $(WAYS)

clean:
	rm -rf $(VENV) build dist
