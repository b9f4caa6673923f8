// Package pypi serves Python packages: the simple index as HTML (PEP 503) and JSON (PEP 691, 700), the files and their
// metadata (PEP 658, 714), and the JSON documents of /pypi/<name>/json.
//
// What a caller may see is decided per file, by the time at which it was uploaded. Upstream tells that in its JSON index
// only; of an upstream with nothing but HTML no file has a date, and a world with a date then shows what its pins name.
// A file is found by its project's page, never by its name alone: what the page hides cannot be fetched by any path.
//
//	/simple/                      all projects; not in a world with a date, since projects have none
//	/simple/<project>/            a project's files
//	/files/<project>/<file>       a file, and with ".metadata" behind it its metadata
//	/at/<host>/<path>             the file that upstream has at this URL
//	/pypi/<project>/json          and /pypi/<project>/<version>/json
//
// What no source dates is as it is today in every world: that a file was yanked, and that a project was archived.
package pypi
