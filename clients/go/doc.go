// Package sluice is the Go client of sluice, which serves language models over gRPC.
//
// A Client has a few connections and opens them as calls overlap. A Stream resumes by itself when its connection breaks
// or its gateway fails; a Session has many generations on one call, each with its own credit. Errors are of type
// *Error. Package sluicev1 holds the generated stubs of the contract.
package sluice
