# shellcheck shell=bash
# Shared by the other scripts, which source it: installs the things that they need. Everything it
# prints goes to stderr.
#
#   ensure_all NEED ...   has all of these. It is silent if they are there. Otherwise it says what it
#                         will install, installs it side by side, with a line for each thing, and
#                         ends the script with the installer's output if that fails.
#
# A need is one of
#
#   python          the server in .venv, the virtual environment of the project
#   python:EXTRA    … with an extra of pyproject.toml besides
#   kafka           the jars of a Kafka broker, in $kafka_jars, and Java
#   spark-kafka     the jars of Spark's Kafka source, in $spark_kafka_jars, and Java
#   s3              the program of an object store, in $s3_server
#   java, wrk, …    a program of the table below; java leaves $JAVA_HOME or the PATH as Spark wants it
#
# Programs come from Debian, and only root can install them; another user is told what to install.
# Jars and the object store are kept in the user's cache, once for all checkouts.
#
#   ensure_environment [EXTRA ...], ensure_kafka, ensure_redis, …
#                         the same for one thing
#   ensure_spark_classes  keeps classes of Spark as Java has them in memory, in .venv: the Sparks of
#                         tests start in half of the time. It can run beside other things.
#   show_help FILE        prints the comment at the head of FILE
#
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$project_root/.venv
cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/delayserver
wheels=$cache/wheels
policy=/usr/sbin/policy-rc.d # Debian's file that says whether a package may start its service

# need      command          Debian package           words for a message
debian_programs="\
java        java             openjdk-17-jre-headless  Java 17 or newer (JAVA_HOME can name it)
maven       mvn              maven                    Maven, which fetches the jars of Kafka and Spark
wrk         wrk              wrk                      the load generator wrk
systemd     systemd-analyze  systemd                  systemd-analyze
redis       redis-server     redis-server             Redis
nats        nats-server      nats-server              NATS
rabbitmq    rabbitmq-server  rabbitmq-server          RabbitMQ
prometheus  promtool         prometheus               Prometheus
chromium    chromium         chromium                 the browser Chromium
postgresql  initdb           postgresql               PostgreSQL
beanstalkd  beanstalkd       beanstalkd               beanstalkd
nodejs      node             nodejs                   Node.js
npm         npm              npm                      npm"

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

show_help() { awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$1"; }

# ---- finding what is there ---------------------------------------------------------------------

# Sets $command, $package and $words to the row of a need.
look_up() {
  local need
  while read -r need command package words; do
    if [[ $need == "$1" ]]; then
      return
    fi
  done <<<"$debian_programs"
  fail "scripts/environment.sh has no need '$1'"
}

# Some of Debian's programs are kept out of everybody's PATH.
has_program() {
  local command package words places=("$PATH" /usr/sbin /usr/lib/rabbitmq/bin /usr/lib/postgresql/*/bin)
  look_up "$1"
  local IFS=:
  PATH="${places[*]}" command -v "$command" >/dev/null
}

# Prints the major version of a java command, or nothing.
java_major() {
  "$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p;' | head -n 1 || true
}

# Spark takes $JAVA_HOME/bin/java if that is set, else the java on the PATH, and Kafka the latter. This
# leaves the caller with a JAVA_HOME and a PATH where both find Java 17 or newer.
find_java() {
  local home
  for home in ${JAVA_HOME:+"$JAVA_HOME"} '' /usr/lib/jvm/*; do
    if [[ $(java_major "${home:+$home/bin/}java") -ge 17 ]]; then
      unset JAVA_HOME
      if [[ -n $home ]]; then
        export JAVA_HOME=$home
        [[ :$PATH: == *":$home/bin:"* ]] || PATH=$home/bin:$PATH
      fi
      return
    fi
  done
  return 1
}

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

# One stamp per extra holds the fingerprint of what was installed: the location (an environment
# cannot be moved), pyproject.toml and the pinned versions.
fingerprint() {
  {
    printf '%s\n' "$project_root"
    cat "$project_root/pyproject.toml" "$project_root/scripts/constraints.txt"
  } | sha256sum | cut -d ' ' -f 1
}

stamp_of() {
  local extra=${1#python}
  extra=${extra#:}
  printf '%s' "$venv/.installed-${extra:-base}"
}

# Whether .venv is a working environment of this place: not one that was copied here with the tree,
# not a half-made one, and not one of a Python that is gone or too old.
is_usable() {
  [[ ! -f $venv/.location || $(<"$venv/.location") == "$project_root" ]] &&
    "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the version that a pom is made for.
version_of() { sed -n 's:.*<[a-z]*\.version>\(.*\)</.*:\1:p' "$project_root/scripts/$1.pom.xml"; }

# Prints the directory of jars, or of the object store. A stamp in it, .complete, holds the digest of
# what was installed: without one it is half-made.
home_of() {
  case $1 in
    s3) printf '%s' "$cache/s3-$(digest_of s3 | head -c 12)" ;;
    *) printf '%s' "$cache/$1-$(version_of "$1")" ;;
  esac
}

digest_of() {
  case $1 in
    s3) sha256sum <"$project_root/scripts/s3.txt" ;;
    *) sha256sum <"$project_root/scripts/$1.pom.xml" ;;
  esac
}

has_stamp() { [[ -f $1 && $(<"$1") == "$2" ]]; }

is_there() {
  local home
  case $1 in
    python | python:*)
      [[ -x $venv/bin/python ]] && has_stamp "$(stamp_of "$1")" "$(fingerprint)"
      ;;
    kafka | spark-kafka | s3)
      home=$(home_of "$1")
      has_stamp "$home/.complete" "$(digest_of "$1")"
      ;;
    ensurepip) "$(find_python)" -c 'import ensurepip, venv' 2>/dev/null ;;
    java) find_java ;;
    *) has_program "$1" ;;
  esac
}

# ---- the needs ---------------------------------------------------------------------------------

# Puts needs into $wanted, each once.
want() {
  local need
  for need in "$@"; do
    [[ " ${wanted[*]} " == *" $need "* ]] || wanted+=("$need")
  done
}

ensure_all() {
  local need wanted=() missing=()
  for need in "$@"; do
    case $need in
      kafka | spark-kafka)
        want java
        is_there "$need" || want maven
        ;;
      python:*) want python ;;
    esac
    want "$need"
  done
  for need in "${wanted[@]}"; do
    is_there "$need" || missing+=("$need")
  done
  if ((${#missing[@]})); then
    install_all "${missing[@]}" || exit
  fi
  for need in "${wanted[@]}"; do
    # shellcheck disable=SC2034 # the callers use them
    case $need in
      java) find_java ;; # which may have been installed by now
      kafka) kafka_jars=$(home_of kafka) ;;
      spark-kafka) spark_kafka_jars=$(home_of spark-kafka) ;;
      s3) s3_server=$(home_of s3)/bin/moto_server ;;
    esac
  done
}

ensure_environment() { ensure_all python "${@/#/python:}"; }
ensure_java() { ensure_all java; }
ensure_wrk() { ensure_all wrk; }
ensure_systemd() { ensure_all systemd; }
ensure_redis() { ensure_all redis; }
ensure_nats() { ensure_all nats; }
ensure_rabbitmq() { ensure_all rabbitmq; }
ensure_prometheus() { ensure_all prometheus; }
ensure_chromium() { ensure_all chromium; }
ensure_kafka() { ensure_all kafka; }
ensure_spark_kafka() { ensure_all spark-kafka; }
ensure_s3() { ensure_all s3; }

# ---- installing ----------------------------------------------------------------------------------
#
# Up to four jobs run side by side: debian, python, s3 and jars. Jobs of what only Debian brings wait
# for it: Maven fetches the jars, and ensurepip makes virtual environments. A job writes into a log of
# its own, which is shown if it fails, and tells through a pipe what it does. Only `install_all` reads
# that pipe and prints, so lines stay whole.
#
#   tell at JOB TEXT       a job begins with something
#   tell has NEED          a need is there
#   tell ended JOB STATUS  a job has ended

tell() { printf '%s\n' "$*" >&"$events"; }

at() {
  tell at "$1" "$2"
  printf '%s ...\n' "$2"
}

# Whether this process may install Debian packages.
can_apt() { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; }

# lock FILE JOB: another script that installs the same is waited for. The lock ends with this shell.
lock() {
  if command -v flock >/dev/null; then
    exec 9<"$1"
    flock --nonblock 9 || {
      at "$2" "waits for another script that installs the same"
      flock 9
    }
  fi
}

# Sets $rest to those of the needs that no other script has installed in the meantime.
set_rest() {
  local need
  rest=()
  for need in "$@"; do
    is_there "$need" || rest+=("$need")
  done
}

# A package that has a service starts none: its program is what is wanted, on ports of the tests.
# Debian asks policy-rc.d; a machine that has one has said what it wants.
install_debian() {
  local rest need command package words advice
  declare -A need_of=()
  lock "${policy%/*}" debian
  set_rest "$@"
  ((${#rest[@]})) || return 0
  for need in "${rest[@]}"; do
    look_up "$need"
    need_of[$package]=$need
  done
  if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  export DEBIAN_FRONTEND=noninteractive LC_ALL=C
  advice="see above. On Debian and Ubuntu: apt-get install ${!need_of[*]}"
  at debian "apt-get update"
  apt-get --quiet update || say "It is tried with the lists that are there."
  at debian "apt-get install ${!need_of[*]}"
  # apt says on the third descriptor what it does with which package.
  { apt-get --quiet --yes --no-install-recommends -o Dpkg::Use-Pty=0 -o APT::Status-Fd=3 \
    install "${!need_of[@]}" 3>&1 >&2; } |
    while IFS=: read -r _ package _ text; do
      if [[ $text == "Installed "* && -n ${need_of[$package]:-} ]]; then
        tell has "${need_of[$package]}"
      fi
    done || fail "apt-get could not install them; $advice"
  for need in "${rest[@]}"; do
    look_up "$need"
    is_there "$need" || fail "$words is missing, although apt-get has installed $package; $advice"
  done
}

# uv takes what pip is configured with, in its files or by PIP_... variables, unless it has been told
# otherwise itself. pip separates several values by spaces or lines.
settings_of_pip() {
  local name value
  while IFS='=' read -r name value; do
    value=${value:1:-1}
    value=${value//'\n'/ }
    case ${name##*.} in
      index-url) name=UV_DEFAULT_INDEX ;;
      extra-index-url) name=UV_INDEX ;;
      find-links) name=UV_FIND_LINKS value=${value// /,} ;;
      no-index) name=UV_NO_INDEX ;;
      trusted-host) name=UV_INSECURE_HOST ;;
      cert) name=SSL_CERT_FILE ;;
      timeout | default-timeout) name=UV_HTTP_TIMEOUT ;;
      *) continue ;;
    esac
    [[ -n ${!name:-} ]] || export "$name=$value"
  done < <("$1" -m pip config list)
}

# install_packages ENVIRONMENT JOB ARGUMENT ...: has uv install these, which takes half of the time that
# pip takes, or else pip. Hundreds of servers are started, so all modules are compiled.
install_packages() (
  environment=$1 job=$2
  shift 2
  settings_of_pip "$environment/bin/python"
  mkdir -p "$wheels"
  export UV_FIND_LINKS=${UV_FIND_LINKS:+$UV_FIND_LINKS,}$wheels
  pip=("$environment/bin/python" -m pip install --disable-pip-version-check --no-input)
  "${pip[@]}" --quiet --constraint "$project_root/scripts/constraints.txt" uv &&
    "$environment/bin/uv" pip install --python "$environment/bin/python" --compile-bytecode "$@" && exit
  at "$job" "uv could not do it, so pip installs them, which takes longer"
  "${pip[@]}" --progress-bar off --find-links "$wheels" "$@"
)

# pyspark comes as source. Its wheel is built once for all checkouts, which uv does for each of them if
# the index says that its files are not to be cached. It is not compressed, which takes 12 s, only to be
# unpacked. Without it uv builds one itself.
build_pyspark() {
  local pinned
  pinned=$(grep '^pyspark==' "$project_root/scripts/constraints.txt")
  if ! compgen -G "$wheels/${pinned/==/-}-*.whl" >/dev/null; then
    at python "builds $pinned"
    printf '[bdist_wheel]\ncompression = stored\n' >"$work/setup.cfg"
    DIST_EXTRA_CONFIG=$work/setup.cfg "$venv/bin/python" -m pip wheel --disable-pip-version-check \
      --no-input --no-cache-dir --progress-bar off --no-deps --wheel-dir "$wheels" "$pinned" || true
  fi
}

install_python() {
  local rest need extras=server
  lock "$project_root/scripts/environment.sh" python
  set_rest "$@"
  ((${#rest[@]})) || return 0
  if ! is_usable; then
    at python "makes .venv with $("$interpreter" --version)"
    "$interpreter" -m venv --clear "$venv" || fail "$interpreter could not make .venv; see above"
  fi
  printf '%s\n' "$project_root" >"$venv/.location"
  for need in "${rest[@]}"; do
    [[ $need == python ]] || extras+=,${need#*:}
  done
  [[ $extras != *,spark* ]] || build_pyspark
  at python "installs delayserver[$extras]"
  cd "$project_root" || exit
  install_packages "$venv" python --constraint scripts/constraints.txt --editable ".[$extras]" ||
    fail "the packages of delayserver[$extras] could not be installed into .venv; see above"
  for need in "${rest[@]}"; do
    fingerprint >"$(stamp_of "$need")"
  done
}

# An environment beside the project's: its library for dates is another one.
install_s3() {
  local rest home
  home=$(home_of s3)
  mkdir -p "$home"
  lock "$home" s3
  set_rest "$@"
  ((${#rest[@]})) || return 0
  at s3 "installs the packages of scripts/s3.txt"
  "$interpreter" -m venv --clear "$home" || fail "$interpreter could not make $home; see above"
  install_packages "$home" s3 --requirement "$project_root/scripts/s3.txt" ||
    fail "the packages of scripts/s3.txt could not be installed into $home; see above"
  digest_of s3 >"$home/.complete"
}

# One after the other: Maven's own cache is made for one Maven at a time.
install_jars() {
  local need home
  find_java
  for need in "$@"; do
    home=$(home_of "$need")
    mkdir -p "$home"
    (
      lock "$home" jars
      set_rest "$need"
      ((${#rest[@]})) || exit 0
      at jars "fetches those of $need with Maven"
      rm -f "$home"/*.jar "$home"/*.jsa # scripts/kafka keeps classes of these jars
      mvn --batch-mode --file "$project_root/scripts/$need.pom.xml" dependency:copy-dependencies \
        -DoutputDirectory="$home" || fail "Maven could not fetch the jars of $need; see above"
      digest_of "$need" >"$home/.complete"
    ) || exit
    tell has "$need"
  done
}

# Prints what is installed for a need, and where.
describe() {
  local command package words
  case $1 in
    python) printf 'delayserver[%s] into .venv' "$extras" ;;
    s3) printf 'the packages of scripts/s3.txt into %s' "$(home_of s3)" ;;
    kafka | spark-kafka) printf 'jars into %s' "$(home_of "$1")" ;;
    *)
      look_up "$1"
      printf 'Debian package %s' "$package"
      ;;
  esac
}

# A job has a process group of its own, so that all of its programs can be ended at once, and reads
# nothing from the terminal.
begin() {
  local list
  read -ra list <<<"${needs_of[$1]}"
  set -m
  {
    ("install_$1" "${list[@]}") </dev/null >"$work/$1" 2>&1
    tell ended "$1" "$?"
  } &
  set +m
  running[$1]=$!
}

# Says that a need is there, once.
done_with() {
  if [[ -n ${left[$1]:-} ]]; then
    unset "left[$1]"
    note "[$((total - ${#left[@]}))/$total] $1: installed after $((SECONDS - started_s)) s"
  fi
}

note() {
  say "$@"
  noted_s=$SECONDS
}

# Prints the last line of each log if nothing was printed for ten seconds. A job that has ended and not
# told so was killed; and if the script itself was killed, nothing is installed for it.
show_life() {
  local job last
  kill -0 $$ 2>/dev/null || exit
  for job in "${!running[@]}"; do
    kill -0 "${running[$job]}" 2>/dev/null || tell ended "$job" 137
    if ((SECONDS - noted_s >= 10)); then
      last=$(tail -c 300 "$work/$job" | tr '\r' '\n' | sed 's/\x1b\[[0-9;]*m//g; /./!d' | tail -n 1)
      say "      $job: ${last:0:80} ($((SECONDS - started_s)) s)"
    fi
  done
  ((SECONDS - noted_s < 10)) || noted_s=$SECONDS
}

# Ends all jobs that still run, with all of their programs.
end_jobs() {
  local job
  for job in "${!running[@]}"; do
    kill -TERM -- "-${running[$job]}" 2>/dev/null
  done
  wait
  rm -rf "$work"
}

install_all() (
  declare -A needs_of=() left=() running=()
  extras=server later='' failed='' lacking=() lacking_words=() noted_s=$SECONDS started_s=$SECONDS
  set -o pipefail
  for need in "$@"; do
    case $need in
      python | python:*) job=python ;;
      kafka | spark-kafka) job=jars ;;
      s3) job=s3 ;;
      *) job=debian ;;
    esac
    [[ $need != python:* ]] || extras+=,${need#*:}
    needs_of[$job]+="$need "
  done
  if [[ -n ${needs_of[s3]:-} ]] || { [[ -n ${needs_of[python]:-} ]] && ! is_usable; }; then
    interpreter=$(find_python) || exit
    # Debian keeps ensurepip, which puts pip into a new environment, in a package of its own.
    if ! is_there ensurepip; then
      package=$("$interpreter" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
      debian_programs+=$'\n'"ensurepip - $package the module ensurepip of $interpreter"
      needs_of[debian]+=ensurepip
    fi
  fi

  for need in ${needs_of[debian]:-}; do
    look_up "$need"
    lacking+=("$package")
    lacking_words+=("$words")
  done
  if ((${#lacking[@]})) && ! can_apt; then
    fail "missing: $(printf '%s; ' "${lacking_words[@]}")on Debian and Ubuntu:" \
      "apt-get install ${lacking[*]}"
  fi
  say "To install:"
  for need in ${needs_of[debian]:-} ${needs_of[python]:+python} ${needs_of[jars]:-} ${needs_of[s3]:-}; do
    left[$need]=1
    say "$(printf '  %-11s %s' "$need" "$(describe "$need")")"
  done
  total=${#left[@]}

  work=$(mktemp -d) || exit
  trap end_jobs EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  mkfifo "$work/events" && exec {events}<>"$work/events" || exit
  for job in "${!needs_of[@]}"; do
    case $job:${needs_of[debian]:-} in
      jars:*java* | jars:*maven* | python:*ensurepip* | s3:*ensurepip*) later+=" $job" ;;
      *) begin "$job" ;;
    esac
  done
  while ((${#running[@]})); do
    read -r -t 2 -u "$events" verb name text || verb=none
    case $verb in
      at) note "      $name: $text ..." ;;
      has) done_with "$name" ;;
      ended)
        [[ -n ${running[$name]:-} ]] || continue
        unset "running[$name]"
        if [[ $text != 0 ]]; then
          note "      $name: failed, and this is its output" && cat "$work/$name" >&2
          failed+=" $name"
          continue
        fi
        for need in ${needs_of[$name]}; do
          done_with "${need%%:*}"
        done
        if [[ $name == debian ]]; then
          for job in $later; do
            begin "$job"
          done
        fi
        ;;
    esac
    show_life
  done
  [[ -z $failed ]] || fail "not everything is installed; the output of$failed is above"
)

# ---- Spark ---------------------------------------------------------------------------------------

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
