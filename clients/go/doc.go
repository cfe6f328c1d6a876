// Package sluice is the Go client of sluice, which serves language models over gRPC.
//
// A Client has a few connections and opens them as calls overlap. A Stream goes on by itself when its connection breaks
// or its gateway dies; a Session has many generations on one call, each with its own credit. What fails is an *Error.
// sluicev1 holds the generated stubs of the contract.
package sluice
