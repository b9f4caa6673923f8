// Package packages tests real package clients in sandboxes, through Aether, against the registries that this machine's own
// clients are configured with: what they install, what a second sandbox's install costs upstream, what the world as of a
// date shows, and how a refusal reads. Expectations about versions and dates come from the registries themselves, asked
// from outside at the time of the test. A registry that cannot be reached from here skips its tests.
//
// The image is the Debian one of test/e2e; clients that it lacks come as toolkits made of this machine's own.
package packages
