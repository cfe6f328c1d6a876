#!/bin/sh
# Builds the driver against Debian's Go packages: the oldest versions supported, grpc-go 1.33 and protobuf-go 1.28.
set -e
if [ ! -d /usr/share/gocode/src/google.golang.org/protobuf ]; then
  echo "golang-google-grpc-dev or golang-google-protobuf-dev is not installed" >&2
  exit 3
fi
src=build/gopath/src/example.com/sluice/go
rm -rf build/gopath && mkdir -p $src
cp *.go $src/
cp -r sluicev1 conformance $src/
export GO111MODULE=off GOPATH="$PWD/build/gopath:/usr/share/gocode"
go vet example.com/sluice/go
go build -o build/driver example.com/sluice/go/conformance
