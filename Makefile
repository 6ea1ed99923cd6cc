# Makefile: what a person types. The work is done in scripts/: pg knows servers, test knows tests, install installs.

MAJORS := 15 16 17 18
ONE := $(firstword $(PG) 18)
PG_CONFIG ?= pg_config
export CARGO_TARGET_DIR ?= $(CURDIR)/target

.PHONY: help demo test lint unit regress hostile isolation client model guards bench psql install dist deb packaging clean packages soak prove
.NOTPARALLEL:

help:
	@echo 'make demo                    payments retried in every way, on a throw-away server'
	@echo 'make test                    all tests on PostgreSQL 15, 16, 17 and 18'
	@echo 'make lint                    formatting, clippy, the SQL scripts'
	@echo 'make guards                  break each guard of the code and see its test turn red (minutes)'
	@echo 'make psql                    psql on a throw-away server with idem'
	@echo 'make unit                    tests without a server'
	@echo 'make regress                 pg_regress tests    (TESTS="a b": these only;'
	@echo 'make hostile                 the same where things are planted on the search_path'
	@echo 'make isolation               isolation specs      ACCEPT=1: take the results as expected)'
	@echo 'make client                  tests from clients  (TESTS=name: a filter)'
	@echo 'make model                   random histories on a server and on a model of the contract (ROUNDS=1000: how many;'
	@echo '                             SEED=... replays a failing one)'
	@echo 'make prove                   crashes, failover, hostile input: an hour in place of minutes (PROVE=3: three times'
	@echo '                             as long; PROVE_SEED=n: the choices of an earlier run; TESTS=name: a filter)'
	@echo 'make bench                   measure idem beside its alternatives, a quarter of an hour (QUICK=1: only see'
	@echo '                             that it works; SCALE=full: ten million keys too; SECONDS_A_RUN, ROUNDS, SECTIONS)'
	@echo 'make soak                    half an hour of steady traffic: sizes and speed must stay flat (SOAK_MINUTES)'
	@echo 'make install PG_CONFIG=...   build idem for a PostgreSQL of yours and install it there (DESTDIR is obeyed)'
	@echo 'make dist                    the committed source as target/dist/idem-VERSION.zip'
	@echo 'make deb PG=15               a Debian package for Debian'"'"'s PostgreSQL in target/dist'
	@echo 'make packaging               build both, install them, use them, remove them (the Debian package only as root)'
	@echo 'make clean                   delete what was built'
	@echo 'PG=17 or PG="15 18" selects the servers.'

packages:
	@scripts/pg packages

demo: packages
	@scripts/pg install $(ONE)
	@cargo build -p idem-harness --bin idem-demo
	@exec scripts/pg run $(ONE) -- "$$CARGO_TARGET_DIR/debug/idem-demo"

psql: packages
	@scripts/pg install $(ONE)
	@exec scripts/pg run $(ONE) -- sh -c 'psql -qXc "CREATE EXTENSION idem" && exec psql'

test: packages
	@exec scripts/test '$(or $(PG),$(MAJORS))' unit regress hostile isolation client model

lint: packages
	@exec scripts/test '$(or $(PG),$(MAJORS))' lint

unit: packages
	@exec scripts/test '' unit

guards: packages
	@scripts/guards $(ONE)

prove: packages
	@TESTS='$(TESTS)' exec scripts/test '$(or $(PG),18)' $(if $(TESTS),,fuzz) prove

regress hostile isolation client: packages
	@TESTS='$(TESTS)' ACCEPT='$(ACCEPT)' exec scripts/test '$(or $(PG),18)' $@

model: packages
	@ROUNDS='$(or $(ROUNDS),300)' SEED='$(SEED)' exec scripts/test '$(or $(PG),18)' model

# A quick run proves nothing but that it runs, and some sections are not all: their results stay out of the repository.
bench:
	@scripts/pg packages bench
	@scripts/pg install $(ONE)
	@cargo build --release -p idem-harness --bin idem-bench
	@QUICK='$(QUICK)' SCALE='$(SCALE)' ROUNDS='$(ROUNDS)' SECONDS_A_RUN='$(SECONDS_A_RUN)' \
		SECTIONS='$(SECTIONS)' BENCH_OUT="$(if $(or $(filter-out 0,$(QUICK)),$(SECTIONS)),$$CARGO_TARGET_DIR/bench)" \
		scripts/pg run $(ONE) -- "$$CARGO_TARGET_DIR/release/idem-bench"

dist:
	@scripts/package dist

deb:
	@scripts/package deb $(ONE)

packaging:
	@scripts/pg packages $(if $(filter 0,$(shell id -u)),deb)
	@exec scripts/test '' packaging

# Another time than half an hour proves less: its results stay out of the repository.
soak: packages
	@scripts/pg install $(ONE)
	@cargo build --release -p idem-harness --bin idem-bench
	@SOAK_MINUTES='$(or $(SOAK_MINUTES),30)' BENCH_OUT="$(if $(SOAK_MINUTES),$$CARGO_TARGET_DIR/bench)" \
		scripts/pg run $(ONE) -- "$$CARGO_TARGET_DIR/release/idem-bench"

install:
	@PG_CONFIG='$(PG_CONFIG)' DESTDIR='$(DESTDIR)' exec scripts/install

clean:
	@scripts/pg clean
	cargo clean
