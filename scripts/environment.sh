# shellcheck shell=bash
# Shared by the other scripts, which source it: the virtual environment .venv of the project, its
# packages, Java for Spark, wrk for benchmarks, brokers, and a browser. Everything it prints goes to stderr.
#
#   ensure_environment [extra ...]   makes .venv and installs the server, with these extras besides;
#                                    does nothing when it was done and nothing has changed since
#   ensure_java                      finds Java 17 or newer, or installs it (root on Debian)
#   ensure_wrk                       finds the load generator wrk, or installs it likewise
#   ensure_systemd                   finds systemd-analyze, or installs it likewise
#   ensure_redis, ensure_nats, ensure_rabbitmq   find these brokers, or install them likewise
#   ensure_postgresql                finds PostgreSQL, or installs it likewise
#   ensure_prometheus                find Prometheus and its promtool, or install them likewise
#   ensure_chromium                  finds the browser that the console is tested in, likewise
#   ensure_kafka                     has the jars of a Kafka broker in $kafka_jars; fetches them with
#                                    Maven, which it installs likewise, once for all checkouts
#   ensure_spark_kafka               has the jars of Spark's Kafka source in $spark_kafka_jars, likewise
#   ensure_spark_classes             keeps classes of Spark as Java has them in memory, in .venv: the
#                                    Sparks of tests start in half of the time
#   ensure_s3                        has the program of an object store in $s3_server; installs it once
#                                    for all checkouts, in an environment of its own
#   show_help FILE                   prints the comment at the head of FILE
#
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$project_root/.venv

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

show_help() { awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$1"; }

# Whether this process may install Debian packages.
can_apt() { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; }

# A package that has a service starts none: its program is what is wanted, on ports of the tests.
# Debian asks policy-rc.d; a machine that has one has said what it wants.
apt_install() (
  say "Installing the Debian package $1 ..."
  policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  {
    DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
      DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "$1"
  } >&2
)

# Prints the path of a Python that is new enough. It is run, not only looked up: a name on the
# PATH may belong to a version manager that has no such version.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    elif [[ $candidate == "${PYTHON:-}" ]]; then
      fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
    fi
  done
  fail "Python 3.11 or newer was not found (tried python3.11, python3.12, python3.13, python3)." \
    "On Debian and Ubuntu: apt-get install python3 python3-venv"
}

make_venv() {
  local python package
  python=$(find_python)
  # Debian keeps ensurepip, which puts pip into a new environment, in a package of its own.
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if can_apt; then
      apt_install "$package" || apt_install python3-venv || true
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$python cannot make virtual environments: its module ensurepip is missing." \
        "On Debian and Ubuntu: apt-get install python3-venv (or $package)"
  fi
  say "Making .venv with $("$python" --version) ..."
  "$python" -m venv --clear "$venv"
}

# One stamp per extra holds the fingerprint of what was installed: the location (an environment
# cannot be moved), pyproject.toml and the pinned versions.
fingerprint() {
  {
    printf '%s\n' "$project_root"
    cat "$project_root/pyproject.toml" "$project_root/scripts/constraints.txt"
  } | sha256sum | cut -d ' ' -f 1
}

is_installed() {
  local want=$1 part
  shift
  for part in base "$@"; do
    [[ -f $venv/.installed-$part && $(<"$venv/.installed-$part") == "$want" ]] || return 1
  done
  [[ -x $venv/bin/python ]]
}

# Whether .venv is a working environment of this place: not one that was copied here with the tree,
# not a half-made one, and not one of a Python that is gone or too old.
is_usable() {
  [[ ! -f $venv/.location || $(<"$venv/.location") == "$project_root" ]] &&
    "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# A subshell, so that neither `cd` nor the lock outlives it.
ensure_environment() (
  want=$(fingerprint)
  if is_installed "$want" "$@"; then
    exit 0
  fi

  cd "$project_root"
  # Two scripts started at once must not install into the same environment.
  if command -v flock >/dev/null; then
    exec 9<scripts/environment.sh
    flock --nonblock 9 || {
      say "Waiting for another script that is installing into .venv ..."
      flock 9
    }
    if is_installed "$want" "$@"; then
      exit 0
    fi
  fi

  if ! is_usable; then
    make_venv
  fi
  printf '%s\n' "$project_root" >"$venv/.location"

  extras=$(IFS=, && printf '%s' "${*:+,$*}")
  say "Installing delayserver[server$extras] into .venv ..."
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint scripts/constraints.txt --editable ".[server$extras]" >&2
  for part in base "$@"; do
    printf '%s\n' "$want" >"$venv/.installed-$part"
  done
)

# Prints the major version of a java command, or nothing.
java_major() {
  "$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p;' | head -n 1 || true
}

# Spark takes $JAVA_HOME/bin/java if that is set, else the java on the PATH. This one leaves the
# caller with a JAVA_HOME, or a PATH, where Spark finds Java 17 or newer.
find_java() {
  local home
  if [[ -n ${JAVA_HOME:-} && $(java_major "$JAVA_HOME/bin/java") -ge 17 ]]; then
    return
  fi
  unset JAVA_HOME
  if [[ $(java_major java) -ge 17 ]]; then
    return
  fi
  for home in /usr/lib/jvm/*; do
    if [[ $(java_major "$home/bin/java") -ge 17 ]]; then
      export JAVA_HOME=$home
      return
    fi
  done
  return 1
}

ensure_java() {
  if find_java; then
    return
  fi
  if can_apt; then
    apt_install openjdk-17-jre-headless || true
    if find_java; then
      return
    fi
  fi
  fail "Spark and Kafka need Java 17 or newer, and none was found." \
    "On Debian and Ubuntu: apt-get install openjdk-17-jre-headless (or set JAVA_HOME)"
}

# ensure_program NAME PACKAGE WHAT: finds a program, or installs its Debian package.
ensure_program() {
  local path=$PATH:/usr/sbin
  if PATH=$path command -v "$1" >/dev/null; then
    return
  fi
  if can_apt; then
    apt_install "$2" || true
    if PATH=$path command -v "$1" >/dev/null; then
      return
    fi
  fi
  fail "$3 is missing. On Debian and Ubuntu: apt-get install $2"
}

ensure_wrk() { ensure_program wrk wrk "the load generator wrk"; }
ensure_systemd() { ensure_program systemd-analyze systemd "systemd-analyze"; }
ensure_redis() { ensure_program redis-server redis-server Redis; }
ensure_nats() { ensure_program nats-server nats-server NATS; }
ensure_prometheus() { ensure_program promtool prometheus Prometheus; }
ensure_chromium() { ensure_program chromium chromium "the browser Chromium"; }
# Debian keeps its programs out of everybody's PATH.
ensure_postgresql() {
  compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null ||
    ensure_program initdb postgresql PostgreSQL
}
# Debian keeps its program for root and for the user rabbitmq out of everybody else's PATH.
ensure_rabbitmq() {
  [[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]] ||
    ensure_program rabbitmq-server rabbitmq-server RabbitMQ
}

ensure_maven() { ensure_program mvn maven "Maven, which fetches jars of Kafka and Spark,"; }

# The stamp holds the fingerprint of the pom. What is there costs a look at it, and no Maven.
has_jars() {
  [[ -f $1/.complete && $(<"$1/.complete") == "$2" ]]
}

# fetch_jars POM DIRECTORY WHAT: has the jars of a pom in a directory of the cache. Java is looked for
# in this shell, which keeps its PATH; all else is done in another, so that neither `cd` nor the lock
# outlives it.
fetch_jars() {
  local pom=$1 jars=$2 want
  want=$(sha256sum <"$pom")
  ensure_java
  if [[ -n ${JAVA_HOME:-} ]]; then
    PATH=$JAVA_HOME/bin:$PATH
  fi
  if has_jars "$jars" "$want"; then
    return
  fi
  ensure_maven
  mkdir -p "$jars"
  (
    if command -v flock >/dev/null; then
      exec 9>"$jars/.lock"
      flock --nonblock 9 || {
        say "Waiting for another script that is fetching $3 ..."
        flock 9
      }
      if has_jars "$jars" "$want"; then
        exit 0
      fi
    fi
    say "Fetching $3 ..."
    rm -f "$jars"/*.jar "$jars"/*.jsa # scripts/kafka keeps classes of these jars
    mvn --batch-mode --no-transfer-progress --quiet --file "$pom" dependency:copy-dependencies \
      -DoutputDirectory="$jars" >&2 || fail "Maven could not fetch $3"
    printf '%s\n' "$want" >"$jars/.complete"
  )
}

# Prints the text of an element of a pom.
of_pom() { sed -n "s:.*<$2>\(.*\)</$2>.*:\1:p" "$1"; }

ensure_kafka() {
  local pom=$project_root/scripts/kafka.pom.xml version
  version=$(of_pom "$pom" kafka.version)
  kafka_jars=${XDG_CACHE_HOME:-$HOME/.cache}/delayserver/kafka-$version
  fetch_jars "$pom" "$kafka_jars" "Kafka $version"
}

ensure_spark_kafka() {
  local pom=$project_root/scripts/spark-kafka.pom.xml version
  version=$(of_pom "$pom" spark.version)
  spark_kafka_jars=${XDG_CACHE_HOME:-$HOME/.cache}/delayserver/spark-kafka-$version
  fetch_jars "$pom" "$spark_kafka_jars" "Spark's Kafka source $version"
}

# The short benchmark stands for what is done on Spark. The stamp says for which Java and which jars,
# as Java itself would ask; without the file, or with one that does not fit, Spark starts slowly.
ensure_spark_classes() {
  local java=${JAVA_HOME:+$JAVA_HOME/bin/}java classes=$venv/spark.jsa want
  want=$({
    "$java" -version 2>&1
    ls -l --time-style=full-iso "$venv"/lib/python*/site-packages/pyspark/jars
  } | sha256sum)
  if [[ -f $classes.of && $(<"$classes.of") == "$want" ]]; then
    return
  fi
  say "Keeping the classes of Spark for its next starts ..."
  rm -f "$classes"
  # Java writes them when it ends, behind the benchmark; what it could print to ends with it.
  if SPARK_SUBMIT_OPTS=-XX:ArchiveClassesAtExit=$classes.part \
    PYTHONPATH=$project_root:$project_root/scripts/benchmarks \
    "$venv/bin/python" -P -m pipeline --quick --only audit 2>&1 | cat >/dev/null &&
    mv -f "$classes.part" "$classes"; then
    printf '%s\n' "$want" >"$classes.of"
  else
    say "They could not be kept: tests on Spark take longer."
  fi
}

# An environment beside the project's, in the cache of the user. Its stamp is as that of the jars.
ensure_s3() {
  local packages=$project_root/scripts/s3.txt home want python
  want=$(sha256sum <"$packages")
  home=${XDG_CACHE_HOME:-$HOME/.cache}/delayserver/s3-${want:0:12}
  s3_server=$home/bin/moto_server
  if [[ -f $home/.complete ]]; then
    return
  fi
  python=$(find_python)
  mkdir -p "$home"
  (
    if command -v flock >/dev/null; then
      exec 9>"$home/.lock"
      flock --nonblock 9 || {
        say "Waiting for another script that is installing the object store of the tests ..."
        flock 9
      }
      if [[ -f $home/.complete ]]; then
        exit 0
      fi
    fi
    say "Installing the object store of the tests ..."
    "$python" -m venv "$home" &&
      "$home/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$packages" >&2 ||
      fail "pip could not install what scripts/s3.txt names"
    touch "$home/.complete"
  )
}
