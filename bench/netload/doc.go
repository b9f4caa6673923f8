// Package netload is what crosses the network in a bench: a Far side that answers, and a caller that measures
// connections from wherever it runs. What a caller does is told it over a pipe, so that it can run inside a sandbox.
//
// A connection begins as TLS does, with a real ClientHello and an answer of the form of a ServerHello, so that whoever
// looks into TLS on the way finds what it looks for. What follows is no TLS: the cost of encryption is the ends' own, and
// not what is to be measured.
package netload
