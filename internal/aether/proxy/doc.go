// Package proxy is the doors for programs that use a proxy: HTTP with CONNECT, and SOCKS5 without authentication. Both
// only find out which target is meant; package forward does the rest. Names and addresses are judged alike, and an address
// that stands for a name means that name.
package proxy
