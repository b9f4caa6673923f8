// Package npm serves JavaScript packages: packuments, full and abbreviated (application/vnd.npm.install-v1+json), single
// versions, dist-tags, and tarballs.
//
// What a caller may see is decided per version, by the packument's "time". It is read as a stream into what is needed of
// each version, so that a packument of hundreds of megabytes costs no such memory. A tarball is found by its packument,
// never by its name alone: what the packument hides cannot be fetched by any path.
//
//	/<name>, /@<scope>/<name>                  the packument; "/" in a scoped name may be "%2f"
//	/<name>/<version or tag>                   a version's document
//	/<name>/-/<file>.tgz                       a tarball, by upstream's name for it or as <name>-<version>.tgz
//	/-/package/<name>/dist-tags                the tags
//
// A tag that points to a hidden version drops, "latest" excepted: it then is the highest visible version that is no
// pre-release, not above what it was. What no source dates is as it is today in every world: deprecations, and tags whose
// version is visible. Search, audit, login and everything that writes is refused.
package npm
