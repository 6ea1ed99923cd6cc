# Makefile: what a person types. Servers are scripts/pg's business, tests are scripts/test's; only `install` is done here.

MAJORS := 15 16 17 18
ONE := $(firstword $(PG) 18)
PG_CONFIG ?= pg_config
export CARGO_TARGET_DIR ?= $(CURDIR)/target

.PHONY: help demo test lint unit regress isolation client psql install clean packages
.NOTPARALLEL:

help:
	@echo 'make demo                    payments retried in every way, on a throw-away server'
	@echo 'make test                    all tests on PostgreSQL 15, 16, 17 and 18'
	@echo 'make lint                    formatting and clippy'
	@echo 'make psql                    psql on a throw-away server with idem'
	@echo 'make unit                    tests without a server'
	@echo 'make regress                 pg_regress tests    (TESTS="a b": these only;'
	@echo 'make isolation               isolation specs      ACCEPT=1: take the results as expected)'
	@echo 'make client                  tests from clients  (TESTS=name: a filter)'
	@echo 'make install PG_CONFIG=...   build idem for a PostgreSQL of yours and install it there (DESTDIR is obeyed)'
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
	@exec scripts/test '$(or $(PG),$(MAJORS))' unit regress isolation client

lint: packages
	@exec scripts/test '$(or $(PG),$(MAJORS))' lint

unit: packages
	@exec scripts/test '' unit

regress isolation client: packages
	@TESTS='$(TESTS)' ACCEPT='$(ACCEPT)' exec scripts/test '$(or $(PG),18)' $@

# $(call config,--option) asks the server's pg_config.
config = $(shell '$(PG_CONFIG)' $(1))
install: VERSION = $(shell sed -n 's/^version *= *"\(.*\)"/\1/p' Cargo.toml | head -n 1)
install: MAJOR = $(shell echo '$(call config,--version)' | sed 's/^PostgreSQL \([0-9]*\).*/\1/')
install: LIB = $(DESTDIR)$(call config,--pkglibdir)
install: SHARE = $(DESTDIR)$(call config,--sharedir)/extension
install:
	@case ' $(MAJORS) ' in *' $(MAJOR) '*) ;; *) echo "'$(PG_CONFIG)' is not the pg_config of a PostgreSQL of $(MAJORS)" >&2; exit 1 ;; esac
	PGRX_PG_CONFIG_PATH='$(abspath $(shell command -v '$(PG_CONFIG)'))' cargo build --release -p idem --no-default-features --features pg$(MAJOR)
	@# `install` makes new files: an old one may be open in a server, or be shared with another tree by a hard link
	@install -d '$(LIB)' '$(SHARE)'
	@install -m 755 "$$CARGO_TARGET_DIR/release/libidem.so" '$(LIB)/idem.so'
	@sed 's/@CARGO_VERSION@/$(VERSION)/' idem.control >"$$CARGO_TARGET_DIR/idem.control"
	@install -m 644 "$$CARGO_TARGET_DIR/idem.control" '$(SHARE)/idem.control'
	@install -m 644 sql/idem.sql '$(SHARE)/idem--$(VERSION).sql'
	@for upgrade in sql/idem--*--*.sql; do if [ -e "$$upgrade" ]; then install -m 644 "$$upgrade" '$(SHARE)/'; fi; done
	@echo "idem $(VERSION) is installed in $(LIB) and $(SHARE)"

clean:
	@scripts/pg clean
	cargo clean
