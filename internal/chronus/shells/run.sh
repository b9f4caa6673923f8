# As run.bash, for any POSIX shell. Its descriptors stay open in what the script starts; doc.go says why that is safe.
case ${1-} in
@TOKEN@) ;;
@TOKEN@-told) \return ;;
': @TOKEN@;'*)
	\command echo '@TOKEN@ syntax' 1<>@OUT@
	\return 2
	;;
*)
	\set -- @TOKEN@-told "$?"
	{
@DUMP@
	} 1<>@OUT@ || \:
	\return "$2"
	;;
esac
\trap '{ \. @IN@;} >/dev/null 2>&1' EXIT
@STATE@
\set -- @SCRIPT@
@CHECK@
\set -- @PREFIX@"$1" @LATE@
