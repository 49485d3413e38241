#!/bin/sh
# Builds batchd_VERSION_ARCHITECTURE.deb from this tree: what `make deb` runs. Needs no debhelper: dpkg-dev and binutils.
#
# It is what `make install DESTDIR=... PREFIX=/usr` makes, less what a package has no use for (pip, bytecode, the manifest), plus
# control files. The wheels in it are for one version of Python and one architecture, so the package is too, and says so.
set -eu
umask 022

TREE=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
BUILD=$(cd "$1" && pwd)
ROOT=$BUILD/deb/batchd
LIBRARY=$ROOT/usr/lib/batchd
PYTHON=${PYTHON:-/usr/bin/python3}
MAINTAINER=${DEB_MAINTAINER:-batchd developers <batchd@users.noreply.github.com>}

fail() {
    printf 'batchd: %s\n' "$*" >&2
    exit 1
}

for tool in dpkg-deb dpkg-shlibdeps readelf; do
    command -v $tool >/dev/null || fail "$tool is needed for a package: apt install dpkg-dev binutils"
done
case $(readlink -f "$PYTHON") in
/usr/bin/python3.*) PYTHON=$(readlink -f "$PYTHON") ;;
*) fail "a package is for Debian's own Python, and $PYTHON is $(readlink -f "$PYTHON"): make deb DEB_PYTHON=/usr/bin/python3" ;;
esac
PACKAGE_OF_PYTHON=${PYTHON##*/}
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' "$TREE/pyproject.toml")
ARCHITECTURE=$(dpkg --print-architecture)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$TREE" log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

stage() {
    rm -rf "$BUILD/deb"
    mkdir -p "$ROOT/DEBIAN"
    PYTHON=$PYTHON DESTDIR=$ROOT PREFIX=/usr SYSCONFDIR=/etc "$TREE/deploy/install.sh" install
    ln -sfn "$PYTHON" "$LIBRARY/bin/python3"
    find "$LIBRARY/bin" -mindepth 1 ! -name batchd ! -name python ! -name python3 ! -name "$PACKAGE_OF_PYTHON" -delete
    for tool in pip setuptools pkg_resources _distutils_hack distutils-precedence.pth; do
        rm -rf "$LIBRARY"/lib/python3*/site-packages/$tool "$LIBRARY"/lib/python3*/site-packages/$tool-*.dist-info
    done
    rm -rf "$ROOT/etc/batchd/installations" "$LIBRARY/manifest" "$LIBRARY/include" "$LIBRARY/share"
    find "$LIBRARY" -name __pycache__ -prune -exec rm -rf {} +
    find "$LIBRARY" -name '*.so*' -type f -exec chmod 644 {} +
}

put_documents() {
    documents=$ROOT/usr/share/doc/batchd
    mkdir -p "$documents" "$ROOT/usr/share/lintian/overrides"
    install -m 644 "$TREE/deploy/debian/copyright" "$documents/copyright"
    install -m 644 "$TREE/deploy/debian/lintian-overrides" "$ROOT/usr/share/lintian/overrides/batchd"
    {
        printf 'batchd (%s) unstable; urgency=medium\n\n' "$VERSION"
        printf '  * Built from the tree of this version; CHANGELOG.md says what is new.\n\n'
        printf ' -- %s  %s\n' "$MAINTAINER" "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n >"$documents/changelog.gz"
}

needed_libraries() { # the packages of those shared libraries that the wheels do not bring along
    mkdir -p "$BUILD/deb/shlibs/debian"
    printf 'Source: batchd\n\nPackage: batchd\nArchitecture: any\n' >"$BUILD/deb/shlibs/debian/control"
    cd "$BUILD/deb/shlibs"
    find "$LIBRARY" -name '*.so*' -type f >objects
    set -- -O --warnings=0
    for folder in "$LIBRARY"/lib/python3*/site-packages/*.libs; do set -- "$@" "-l$folder"; done
    xargs dpkg-shlibdeps "$@" <objects | sed -n 's/^shlibs:Depends=//p'
}

write_control() {
    libraries=$(needed_libraries)
    [ -n "$libraries" ] || fail "dpkg-shlibdeps did not say which libraries are needed"
    cat >"$ROOT/DEBIAN/control" <<END
Package: batchd
Version: $VERSION
Architecture: $ARCHITECTURE
Maintainer: $MAINTAINER
Installed-Size: $(du -sk --exclude=DEBIAN "$ROOT" | cut -f 1)
Depends: $PACKAGE_OF_PYTHON, adduser, $libraries
Recommends: systemd
Section: science
Priority: optional
Description: data server for teams that train models
 A daemon that decodes training batches once, into shared memory, for every
 trainer on the machine. Its workers read, decode and augment; trainers get a
 handle to a batch and read it in place, or over TCP from other hosts.
 .
 The libraries that it needs come along, for $PACKAGE_OF_PYTHON, in a directory of
 its own.
END
    printf '/etc/batchd/batchd.toml\n' >"$ROOT/DEBIAN/conffiles"
    for script in postinst prerm postrm; do install -m 755 "$TREE/deploy/debian/$script" "$ROOT/DEBIAN/$script"; done
    (cd "$ROOT" && find . -path ./DEBIAN -prune -o -path ./etc -prune -o -type f -printf '%P\n' |
        LC_ALL=C sort | xargs -d '\n' md5sum >DEBIAN/md5sums)
}

stage
put_documents
write_control
dpkg-deb --root-owner-group -Zxz -z2 --build "$ROOT" "$BUILD/batchd_${VERSION}_$ARCHITECTURE.deb"
