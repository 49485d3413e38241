#!/bin/sh
# Installs batchd from this tree, and removes it again: what `make install`, `make uninstall` and `make wheelhouse` run.
#
#   PREFIX/lib/batchd           a virtual environment of its own, with both distributions, and the list of all that was installed
#   PREFIX/bin/batchd           a link into it
#   PREFIX/share/...            completion for bash, zsh and fish, manual pages, and the pages of docs/
#   PREFIX/lib/systemd, ...     units, sysusers and tmpfiles; below SYSCONFDIR where systemd does not look into PREFIX
#   SYSCONFDIR/batchd           batchd.toml, which is never overwritten; in installations/, what each installation found and made
#
# Three ways: as root (with the system user), as somebody else (PREFIX=$HOME/.local; no user, no units), and with DESTDIR, for
# packages (files alone). A new tree is made beside the old one, and takes its place only when it is whole.
set -eu
umask 022

TREE=$(cd "$(dirname "$0")/.." && pwd)
USER_NAME=batchd
PYTHON=${PYTHON:-python3}
PREFIX=${PREFIX:-/usr/local}
DESTDIR=${DESTDIR:-}
WHEELS=${WHEELS:-}
EXTRAS=${EXTRAS:-}
PURGE=${PURGE:-}

say() { printf '%s\n' "$*"; }
fail() {
    printf 'batchd: %s\n' "$*" >&2
    exit 1
}

is_staged() { [ -n "$DESTDIR" ]; }
is_system() { [ -z "$DESTDIR" ] && [ "$(id -u)" -eq 0 ]; }
is_personal() { [ -z "$DESTDIR" ] && [ "$(id -u)" -ne 0 ]; }
has_systemd() { [ -d /run/systemd/system ]; }

# --- places ------------------------------------------------------------------------------------------------------------

choose_places() {
    if [ -z "${SYSCONFDIR:-}" ]; then
        SYSCONFDIR=/etc
        if is_personal; then SYSCONFDIR=${XDG_CONFIG_HOME:-$HOME/.config}; fi
    fi
    check_place PREFIX "$PREFIX"
    check_place SYSCONFDIR "$SYSCONFDIR"
    if is_staged; then check_place DESTDIR "$DESTDIR"; fi
    LIBRARY=$PREFIX/lib/batchd
    MANIFEST=$DESTDIR$LIBRARY/manifest
    CONFIG=$SYSCONFDIR/batchd/batchd.toml
    RECORDS=$DESTDIR$SYSCONFDIR/batchd/installations
    RECORD=$RECORDS/$(say "${PREFIX#/}" | tr / %)
    case $PREFIX in
    /usr | /usr/local) SYSTEM=$PREFIX/lib ;;
    *) SYSTEM=$SYSCONFDIR ;;
    esac
}

check_place() { # these paths go into scripts and units as they are
    case $2 in
    / | *[!A-Za-z0-9/._+@~-]*) fail "$1=$2: use letters, digits and / . _ + @ ~ - alone, and not the root" ;;
    /*) ;;
    *) fail "$1=$2: give an absolute path" ;;
    esac
}

check_python() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python 3.11 or newer is needed; $PYTHON is $("$PYTHON" --version 2>&1). Try: make PYTHON=python3.12 install"
    "$PYTHON" -c 'import venv, ensurepip' ||
        fail "$PYTHON lacks the venv module. On Debian and Ubuntu: apt install python3-venv"
}

check_library() {
    mkdir -p "$DESTDIR/"
    (make_directory "$PREFIX/lib") 2>/dev/null || true
    [ -w "$DESTDIR$PREFIX/lib" ] || fail "$DESTDIR$PREFIX/lib cannot be written: run this as root, or with PREFIX=\$HOME/.local"
    if [ -e "$DESTDIR$LIBRARY" ] && [ ! -f "$MANIFEST" ]; then
        fail "$DESTDIR$LIBRARY is there already, and not from \`make install\`: remove it (apt remove batchd), or give another PREFIX"
    fi
}

# --- the virtual environment ---------------------------------------------------------------------------------------------

pip_in() { # VENV COMMAND ...: from the directory WHEELS alone, where one is given
    environment=$1 command=$2
    shift 2
    if [ -n "$WHEELS" ]; then
        "$environment/bin/python" -m pip "$command" -q --disable-pip-version-check --no-index --find-links "$WHEELS" "$@"
    else
        "$environment/bin/python" -m pip "$command" -q --disable-pip-version-check "$@"
    fi
}

build_wheels() { # VENV FOLDER: from a copy, so that root leaves nothing in somebody's tree
    mkdir "$2/source"
    cp -R "$TREE/client" "$TREE/batchd" "$TREE/pyproject.toml" "$TREE/setup.py" "$TREE/README.md" "$TREE/LICENSE" "$TREE/LICENSE.libjpeg-turbo" "$2/source"
    rm -rf "$2/source/client/build" "$2/source/client"/*.egg-info
    pip_in "$1" wheel --no-deps --wheel-dir "$2" "$2/source/client" "$2/source"
    CLIENT_WHEEL=$(echo "$2"/batchd_client-*.whl)
    SERVER_WHEEL=$(echo "$2"/batchd-*.whl)
}

make_environment() { # as it will be at LIBRARY, at LIBRARY.new
    say "making $DESTDIR$LIBRARY (a minute or so)"
    rm -rf "$NEW"
    "$PYTHON" -m venv --prompt batchd "$NEW"
    build_wheels "$NEW" "$WORK"
    pip_in "$NEW" install --no-compile "$CLIENT_WHEEL" "$SERVER_WHEEL${EXTRAS:+[$EXTRAS]}"
    forget_origin
    find "$NEW/bin" "$NEW/pyvenv.cfg" -type f -exec sed -i "s|$NEW|$LIBRARY|g" {} +
    "$NEW/bin/python" -m compileall -q -f -s "$NEW" -p "$LIBRARY" "$NEW/lib"
}

forget_origin() { # where the wheels lay while they were installed is nobody's business later
    for record in "$NEW"/lib/python3*/site-packages/batchd*.dist-info; do
        rm -f "$record/direct_url.json"
        sed -i '/direct_url\.json,/d' "$record/RECORD"
    done
}

batchd_of_new() { "$NEW/bin/python" "$NEW/bin/batchd" "$@"; }

# --- files: each one that is put somewhere is in the manifest, and each directory that is made for it -------------------------

make_directory() {
    if [ ! -d "$DESTDIR$1" ]; then
        make_directory "$(dirname "$1")"
        mkdir "$DESTDIR$1"
        say "directory $1" >>"$WORK/manifest"
    fi
}

put() { # FILE PATH
    make_directory "$(dirname "$2")"
    install -m 644 "$1" "$DESTDIR$2"
    say "file $2" >>"$WORK/manifest"
}

put_completion() {
    for shell in bash zsh fish; do
        _BATCHD_COMPLETE=${shell}_source batchd_of_new >"$WORK/completion.$shell"
        grep -q _BATCHD_COMPLETE "$WORK/completion.$shell" || fail "no completion for $shell was made"
    done
    zsh_directory=$PREFIX/share/zsh/site-functions
    if [ "$PREFIX" = /usr ]; then zsh_directory=$PREFIX/share/zsh/vendor-completions; fi
    put "$WORK/completion.bash" "$PREFIX/share/bash-completion/completions/batchd"
    put "$WORK/completion.zsh" "$zsh_directory/_batchd"
    put "$WORK/completion.fish" "$PREFIX/share/fish/vendor_completions.d/batchd.fish"
}

put_system_files() {
    put_for_systemd batchd.service systemd/system/batchd.service
    put_for_systemd batchd@.service systemd/system/batchd@.service
    put_for_systemd batchd.sysusers sysusers.d/batchd.conf
    put_for_systemd batchd.tmpfiles tmpfiles.d/batchd.conf
}

put_for_systemd() { # NAME-IN-DEPLOY PLACE, with the paths of this installation
    if [ ! -f "$TREE/deploy/$1" ]; then
        say "MISSING: deploy/$1 is not in this tree, so $SYSTEM/$2 is not installed" >&2
        return
    fi
    sed -e "s|/usr/\(local/\)\{0,1\}bin/batchd|$PREFIX/bin/batchd|g" -e "s|/etc/batchd|$SYSCONFDIR/batchd|g" \
        -e "s|/usr/share/doc/batchd|$PREFIX/share/doc/batchd|g" "$TREE/deploy/$1" >"$WORK/system-file"
    put "$WORK/system-file" "$SYSTEM/$2"
}

put_config() { # the only file that is the operator's, so it is in no manifest
    batchd_of_new config >"$WORK/batchd.toml"
    if is_staged || [ ! -e "$CONFIG" ]; then
        mkdir -p "$DESTDIR$(dirname "$CONFIG")"
        install -m 644 "$WORK/batchd.toml" "$DESTDIR$CONFIG"
    elif ! cmp -s "$WORK/batchd.toml" "$CONFIG"; then
        install -m 644 "$WORK/batchd.toml" "$CONFIG.new"
        say "$CONFIG stays as it is; what this version would begin with is in $CONFIG.new"
    fi
}

put_documents() { # as they are; what they say of deploy/ and examples/ is in the tree
    for page in "$TREE"/docs/*.md "$TREE"/docs/moving/*.md "$TREE"/docs/sources/*.md; do
        case ${page##*/} in
        *_head.md) ;; # the beginning of a page that is made
        *) put "$page" "$PREFIX/share/doc/batchd/${page#"$TREE"/docs/}" ;;
        esac
    done
}

put_manual() {
    "$NEW/bin/python" "$TREE/docs/make_manpages.py" "$WORK/manual"
    for page in "$WORK"/manual/*.1; do
        gzip -9n "$page"
        put "$page.gz" "$PREFIX/share/man/man1/${page##*/}.gz"
    done
}

put_link() {
    make_directory "$PREFIX/bin"
    ln -sfn ../lib/batchd/bin/batchd "$DESTDIR$PREFIX/bin/batchd"
    say "file $PREFIX/bin/batchd" >>"$WORK/manifest"
}

record_what_is_there() { # before the first file is put: a purge leaves what was there before this installation
    if [ -e "$RECORD" ]; then return; fi
    say "prefix $PREFIX" >"$WORK/record"
    data_places | while read -r place; do
        if [ -e "$place" ]; then say "found $place"; fi
    done >>"$WORK/record"
    mkdir -p "$RECORDS"
    mv "$WORK/record" "$RECORD"
}

take_over() { # the new environment becomes the one; what only the old one had goes
    touch "$WORK/old-manifest"
    if [ -f "$MANIFEST" ]; then cp "$MANIFEST" "$WORK/old-manifest"; fi
    grep '^file ' "$WORK/old-manifest" | grep -vxFf "$WORK/manifest" | while read -r _ path; do rm -f "$DESTDIR$path"; done
    grep '^directory ' "$WORK/old-manifest" | cat - "$WORK/manifest" | awk '!seen[$0]++' >"$NEW/manifest"
    rm -rf "$DESTDIR$LIBRARY.old"
    if [ -e "$DESTDIR$LIBRARY" ]; then mv "$DESTDIR$LIBRARY" "$DESTDIR$LIBRARY.old"; fi
    mv "$NEW" "$DESTDIR$LIBRARY"
    rm -rf "$DESTDIR$LIBRARY.old"
}

# --- the system ----------------------------------------------------------------------------------------------------------

make_user() {
    if ! getent passwd $USER_NAME >/dev/null; then say "made user" >>"$RECORD"; fi
    if ! getent group $USER_NAME >/dev/null; then say "made group" >>"$RECORD"; fi
    if [ -f "$SYSTEM/sysusers.d/batchd.conf" ] && command -v systemd-sysusers >/dev/null; then
        systemd-sysusers "$SYSTEM/sysusers.d/batchd.conf"
    fi
    getent group $USER_NAME >/dev/null || groupadd --system $USER_NAME
    getent passwd $USER_NAME >/dev/null || useradd --system --gid $USER_NAME --no-create-home \
        --home-dir /var/lib/batchd --shell /usr/sbin/nologin --comment 'batchd data server' $USER_NAME
}

tell_systemd() {
    if has_systemd; then
        systemctl daemon-reload
        if [ -f "$SYSTEM/tmpfiles.d/batchd.conf" ]; then systemd-tmpfiles --create "$SYSTEM/tmpfiles.d/batchd.conf"; fi
    fi
}

check_as_user() {
    setpriv --reuid=$USER_NAME --regid=$USER_NAME --clear-groups "$LIBRARY/bin/batchd" --version >/dev/null ||
        fail "it is installed, but user $USER_NAME cannot run it: is $(readlink -f "$LIBRARY/bin/python") in somebody's home?" \
            "Then install with another interpreter: make install PYTHON=/usr/bin/python3"
}

what_next() {
    if is_staged; then
        say "batchd $VERSION lies in $DESTDIR. No user was made and nothing was started: packages do that where they are installed"
        return
    fi
    say "batchd $VERSION is installed: $PREFIX/bin/batchd, with $CONFIG"
    say "Next:"
    say "  1. name your data in $CONFIG"
    say "  2. $PREFIX/bin/batchd check $CONFIG"
    if is_personal; then
        say "  3. $PREFIX/bin/batchd serve $CONFIG"
        say "You are not root, so there is no system user and no systemd unit: the daemon runs as you, from a shell or a job"
        case :$PATH: in *:$PREFIX/bin:*) ;; *) say "$PREFIX/bin is not in your PATH" ;; esac
        return
    fi
    if has_systemd; then
        say "  3. systemctl enable --now batchd      (not done by itself)"
    else
        say "  3. $PREFIX/bin/batchd serve --detach $CONFIG      (no systemd runs here)"
    fi
    say "  4. usermod -aG $USER_NAME ALICE         for each person who may train from it"
}

# --- commands ------------------------------------------------------------------------------------------------------------

install_all() {
    check_python
    check_library
    NEW=$DESTDIR$LIBRARY.new
    make_environment
    VERSION=$(batchd_of_new --version)
    VERSION=${VERSION#batchd }
    record_what_is_there
    put_config
    put_completion
    put_manual
    put_documents
    put_link
    if ! is_personal; then put_system_files; fi
    take_over
    if is_system; then
        make_user
        tell_systemd
        check_as_user
    fi
    what_next
}

stop_services() {
    for unit in batchd.service $(systemctl list-units --all --plain --no-legend 'batchd@*.service' | cut -d ' ' -f 1); do
        systemctl disable --quiet --now "$unit" 2>/dev/null || systemctl stop "$unit" 2>/dev/null || true
    done
}

unit_is_ours() { # an installation with another PREFIX may have put its own in the same place
    grep -qs "^ExecStart=$PREFIX/bin/batchd " "$DESTDIR$SYSTEM/systemd/system/batchd.service"
}

remove_file() {
    case $1 in
    "$SYSTEM"/systemd/* | "$SYSTEM"/sysusers.d/* | "$SYSTEM"/tmpfiles.d/*) if [ -n "$UNIT_OF_OTHERS" ]; then return; fi ;;
    esac
    rm -f "$DESTDIR$1"
}

uninstall_all() {
    if [ ! -f "$MANIFEST" ] && { [ -z "$PURGE" ] || [ ! -f "$RECORD" ]; }; then
        fail "nothing from \`make install\` is at $DESTDIR$LIBRARY; with another PREFIX or DESTDIR, give it here too"
    fi
    if [ -n "$PURGE" ]; then prepare_purge; fi
    if [ -f "$MANIFEST" ]; then remove_files; fi
    if [ -n "$PURGE" ]; then purge; else say_what_stays; fi
}

remove_files() {
    UNIT_OF_OTHERS=yes
    if unit_is_ours || [ ! -e "$DESTDIR$SYSTEM/systemd/system/batchd.service" ]; then UNIT_OF_OTHERS=; fi
    if is_system && has_systemd && unit_is_ours; then stop_services; fi
    cp "$MANIFEST" "$WORK/manifest"
    grep '^file ' "$WORK/manifest" | while read -r _ path; do remove_file "$path"; done
    rm -rf "$DESTDIR$LIBRARY"
    grep '^directory ' "$WORK/manifest" | sort -r | while read -r _ path; do
        if [ -d "$DESTDIR$path" ]; then rmdir --ignore-fail-on-non-empty "$DESTDIR$path"; fi
    done
    if is_system && has_systemd; then systemctl daemon-reload; fi
    say "batchd is removed from $DESTDIR$PREFIX"
}

data_places() {
    say "$DESTDIR$SYSCONFDIR/batchd"
    if is_personal; then
        say "${XDG_CACHE_HOME:-$HOME/.cache}/batchd"
    else
        for name in batchd $(instances); do
            for place in /var/lib /var/cache /run; do say "$DESTDIR$place/$name"; done
        done
    fi
}

instances() { # batchd@NAME has a configuration NAME.toml, and directories of its own
    for file in "$DESTDIR$SYSCONFDIR"/batchd/*.toml; do
        name=${file##*/}
        if [ "$name" != batchd.toml ] && [ -e "$file" ]; then say "batchd-${name%.toml}"; fi
    done
}

# --- purging: what this installation made, and nothing that somebody uses ------------------------------------------------------

own_places() {
    data_places | while read -r place; do
        if [ -e "$place" ] && ! grep -qxF "found $place" "$RECORD"; then say "$place"; fi
    done
}

has_made() { is_system && grep -qx "made $1" "$RECORD"; }

prepare_purge() { # nothing is changed before this has passed
    if [ ! -f "$RECORD" ]; then
        fail "$RECORD is missing, so nobody knows what this installation made: uninstall it without PURGE, and remove by hand what is yours"
    fi
    refuse_while_others_are_installed
    own_places >"$WORK/purged"
    refuse_while_a_process_uses "$DESTDIR$LIBRARY" "$WORK/purged"
    say "PURGE=1 removes what this installation made:"
    if [ -f "$MANIFEST" ]; then say "  $DESTDIR$LIBRARY, and $(grep -c '^file ' "$MANIFEST") files of its manifest"; fi
    sed 's/^/  /' "$WORK/purged"
    for kind in user group; do
        if has_made $kind; then say "  the $kind $USER_NAME"; fi
    done
    sed -n 's/^found /stays, as it was there before: /p' "$RECORD"
}

refuse_while_others_are_installed() {
    for record in "$RECORDS"/*; do
        other=$(sed -n 's/^prefix //p' "$record")
        if [ "$record" != "$RECORD" ] && [ -d "$DESTDIR$other/lib/batchd" ]; then
            fail "the installation in $DESTDIR$other uses $DESTDIR$SYSCONFDIR/batchd too: nothing is purged. Without PURGE, only $DESTDIR$PREFIX goes"
        fi
    done
    if is_personal; then return; fi
    for folder in /etc /usr/local/lib /usr/lib "$SYSTEM"; do
        unit=$DESTDIR$folder/systemd/system/batchd.service
        if [ -f "$unit" ] && ! grep -q "^ExecStart=$PREFIX/bin/batchd " "$unit"; then
            fail "$unit is of another installation, with the same data and user: nothing is purged. Without PURGE, only $DESTDIR$PREFIX goes"
        fi
    done
}

refuse_while_a_process_uses() { # LIBRARY PLACES: programs that run from it, and files and sockets that are open in these
    for process in /proc/[0-9]*; do
        program=$(tr '\0' ' ' 2>/dev/null <"$process/cmdline") || continue
        case $program in
        "$1"/bin/*) fail "process ${process#/proc/} runs from $1: end it first (systemctl stop batchd): $program" ;;
        esac
    done
    while read -r place; do
        if grep -qsF " $place/" /proc/net/unix; then
            fail "a daemon listens in $place: end it first (systemctl stop batchd)"
        fi
        user=$(find /proc/[0-9]*/fd -lname "$place/*" -print -quit 2>/dev/null | cut -d / -f 3)
        if [ -n "$user" ]; then fail "process $user has files of $place open: end it first (systemctl stop batchd)"; fi
    done <"$2"
}

purge() { # the record goes last but for its folder, so that a purge that was cut off can be repeated
    if has_made user && getent passwd $USER_NAME >/dev/null; then userdel $USER_NAME; fi
    if has_made group && getent group $USER_NAME >/dev/null; then groupdel $USER_NAME; fi
    tac "$WORK/purged" | while read -r place; do rm -rf "$place"; done # the configuration, with the record, is the last
    if [ -f "$RECORD" ]; then # in a folder that was there before
        rm -f "$RECORD"
        rmdir --ignore-fail-on-non-empty "$RECORDS"
    fi
}

say_what_stays() {
    data_places | while read -r place; do
        if [ -e "$place" ]; then say "stays: $place"; fi
    done
    if is_system && getent passwd $USER_NAME >/dev/null; then say "stays: the user and the group $USER_NAME"; fi
    say "(make uninstall PURGE=1 removes what this installation made of these)"
}

wheelhouse() { # FOLDER: all that an installation without an index needs besides this tree
    check_python
    "$PYTHON" -m venv "$WORK/venv"
    build_wheels "$WORK/venv" "$WORK"
    mkdir -p "$1"
    pip_in "$WORK/venv" wheel --wheel-dir "$1" 'setuptools>=77' "$CLIENT_WHEEL" "$SERVER_WHEEL${EXTRAS:+[$EXTRAS]}"
    rm -f "$1"/batchd-*.whl "$1"/batchd_client-*.whl
    say "$1 holds what batchd needs: make install WHEELS=$1"
}

choose_places
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
touch "$WORK/manifest"
case ${1:-} in
install) install_all ;;
uninstall) uninstall_all ;;
wheelhouse) wheelhouse "$2" ;;
*) fail "usage: $0 install | uninstall | wheelhouse FOLDER" ;;
esac
