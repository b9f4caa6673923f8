# A script of several lines is parsed in whole before any of it is run, as it would be with what it may switch on
# itself. If it cannot be, then what is run in its place says why, and nothing else.
(\eval "@NOEXEC@;$1") 2>/dev/null || (@EXTGLOB@\eval "@NOEXEC@;$1") 2>/dev/null || {
	\command echo '@TOKEN@ syntax' 1<>@OUT@
	\trap - EXIT
	\set -- ": @TOKEN@;@NOEXEC@;$1"
	\return 0
}
