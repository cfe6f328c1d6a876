#!/bin/sh
# Builds the package, and installs its tarball beside the driver, as users get it.
set -e
if ! npm ci --silent --no-audit --no-fund >/dev/null 2>&1; then
  echo "its packages cannot be installed: the npm registry is not reached" >&2
  exit 3
fi
npx tsc -p .
rm -rf build && mkdir -p build
npm pack --silent --pack-destination build >/dev/null
cp conformance/driver.js build/
cd build
echo '{"private": true}' >package.json
npm install --silent --no-audit --no-fund --no-save ./sluice-client-*.tgz >/dev/null
