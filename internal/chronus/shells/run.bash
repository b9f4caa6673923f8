# Sourced before the script and at exit; also right after the script where that may have set an EXIT trap of its own,
# which then runs last. What the first positional parameter is tells them apart: no variable that a script could make
# read-only. At exit nothing that is done here changes the shell's status.
case ${1-} in
@TOKEN@) ;;
@TOKEN@-told) \builtin return ;;
': @TOKEN@;'*)
	# The script's only line was not run, since it cannot be parsed.
	\builtin echo '@TOKEN@ syntax' 1<>@OUT@
	\builtin return 2
	;;
*)
	\builtin set -- @TOKEN@-told "$?"
	{
@DUMP@
	} 1<>@OUT@ || \builtin :
	\builtin return "$2"
	;;
esac
case ${1-} in
@TOKEN@)
	# Copies that bash itself makes, to restore a descriptor, are closed at exec, and so is a copy of such a copy.
	{ \exec 252<&10 253<&11; } 250<&- 251<&-
	\exec 250<&252 251<&253 252<&- 253<&-
	\trap '{ \. @IN@;} >/dev/null 2>&1' EXIT
@STATE@
	\set -- @SCRIPT@
@CHECK@
	\set -- @PREFIX@"$1" @LATE@
	;;
esac
