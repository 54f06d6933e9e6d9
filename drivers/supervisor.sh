# What we leave on a host: begins commands, ends them, and writes down how they ended.  Knows nothing of steps, only of POSIX sh and coreutils.
#
# Sourced in the root directory, with `digest`, `shell` and `boot_id` set, by a shell that then calls one of the verbs.  The root holds
#
#     bin/DIGEST         this file; bin/able: what `env` here can do for us
#     jobs/NAME/         one job: pid (who looks after it, and its first process), spec, exit, log, latest.json, and what is asked of it
#     keeper/pid         the one process that keeps time for all jobs here, while there are any: limits, heartbeats, the dead-man timer
#     watch/PID          a fifo for everybody who wants to hear of ends
#     contact            written whenever somebody talks to us; deadman: how long nobody may
#
# `exit` is made with the job, as blanks: the end is written over them, so that a full disk cannot lose it.  It counts once it ends with a dot.
# A process is named by its number and when it began (in /proc), so that a number used again is never taken for it.
# Time is counted in hundredths of a second since boot: nobody can set that clock.
# What the shell can do itself is not left to a program: one more is a millisecond of every job.

blanks='                                                                '
blanks=$blanks$blanks$blanks$blanks
newline='
'
root=$PWD
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/current-system/sw/bin
LC_ALL=C
keep_ends=1000   # jobs that are over and still known
linger=500       # the keeper goes this long after the last job
beat_every=500   # between heartbeats
stray_grace=100  # between SIGTERM and SIGKILL for what a job left behind
shy_grace=20     # the same for what is in its group and has no cookie: often only the remains of a process, which nobody has fetched yet
lost_grace=200   # the same for what nobody looks after any more
limit_grace=1000 # the same for a job that ran out of time
hopeless=500     # after SIGKILL, when we stop waiting for a process that cannot die

setsid=''
for place in /usr/bin /bin /usr/local/bin /run/current-system/sw/bin; do
    if [ -x "$place/setsid" ]; then
        setsid=$place/setsid
        break
    fi
done
proc=''
[ ! -r /proc/self/stat ] || proc=/proc
able='' # what makes `env` undo ignored signals
locked=${locked-} # whether locks are held for a job, which the keeper must not inherit
{ read -r able <bin/able; } 2>/dev/null

# --- small questions, answered in the variable of the same name

now() { # hundredths of a second since boot
    if { read -r now rest </proc/uptime; } 2>/dev/null; then
        now=${now%.*}${now#*.}
    else
        now=$(date +%s)00
    fi
}

clock() { # seconds since the epoch
    clock=$(date +%s.%N)
    case $clock in *[!0-9.]* | *.) clock=$(date +%s) ;; esac
}

booted() { # which start of this machine it is
    { read -r booted <"$boot_id"; } 2>/dev/null || booted=-
}

born() { # PID: when that process began; empty when it is no more
    born=''
    if [ -z "$proc" ]; then
        ! kill -0 "$1" 2>/dev/null || born=-
        return 0
    fi
    { IFS= read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 0
    set -- ${stat##*)}
    case $1 in Z | X) return 0 ;; esac
    born=${20}
}

myself() { # the number of this very process, which in a subshell `$$` is not
    if [ -n "$proc" ]; then read -r myself rest </proc/self/stat; else myself=$(exec sh -c 'echo $PPID'); fi
}

ended() { # NAME: how it ended; false while it has not
    ended=''
    { read -r ended <"jobs/$1/exit"; } 2>/dev/null || return 1
    case $ended in *' .') return 0 ;; esac
    return 1
}

owned() { # NAME: keeper and keeper_born, first and first_born, at_boot; false while nobody has written them down
    mark=''
    { read -r keeper keeper_born first first_born at_boot mark <"jobs/$1/pid"; } 2>/dev/null
    [ "$mark" = . ]
}

pids() { # NAME: every living process that bears its cookie
    pids=''
    [ -n "$proc" ] || return 0
    for file in $(grep -lszF -e "RECIPE_JOB=$1@$root:" /proc/[0-9]*/environ 2>/dev/null); do
        file=${file#/proc/}
        pids="$pids ${file%/*}"
    done
}

ooms() { # how often the kernel has killed for memory, here
    ooms=0
    for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
        [ -r "$file" ] || continue
        while read -r word count; do
            [ "$word" != oom_kill ] || ooms=$count
        done <"$file"
        return 0
    done
}

# --- a job

start() { # NAME ARGUMENT…, with cwd log limit idle metrics set, and `environment` defined.  Answers new, old, or no and why
    name=$1
    shift
    here=jobs/$name
    if ! { mkdir "$here" || { mkdir -p jobs watch && mkdir "$here"; }; } 2>/dev/null; then
        [ -d "$here" ] || words=$(mkdir -p jobs watch 2>&1 && mkdir "$here" 2>&1)
        if [ -d "$here" ]; then echo old; else printf 'no %s\n' "$words"; fi
        return
    fi
    if ! printf '%s\n' "$blanks" 2>/dev/null >"$here/exit"; then
        rm -rf "$here"
        echo 'no No space left on device'
        return
    fi
    log=${log:-$root/$here/log}
    (supervise "$@") </dev/null >/dev/null 2>&1 &
    ensure_keeper
    echo new
}

hold() { # NAME LOCK…: runs the program of its input, which starts that job, with these locks held by all of it.  Answers as that does, or busy
    lock_folder || return 0
    if [ -d "jobs/$1" ]; then set --; else shift; fi # the job itself may hold them already
    for lock in "$@"; do
        shift
        set -- "$@" flock -n "$locks/$lock.lock"
    done
    locked=yes
    export locked
    answer=$($setsid "$@" $shell -s)
    locked=''
    echo "${answer:-busy}"
    ensure_keeper # not from within, where it would hold them, too
}

unheld() { # LOCK…: those that no process holds, a line each
    lock_folder || return 0
    for lock in "$@"; do
        ! flock -n -s "$locks/$lock.lock" true || printf '%s\n' "$lock"
    done
}

lock_folder() { # locks: where those of this login are; false, and why, where it is not its own.  The same place as in _supervisor.py
    command -v flock >/dev/null || {
        echo "no flock is not installed there: it holds GPUs (package util-linux)"
        return 1
    }
    locks=/tmp/recipe-$(id -u)/gpus
    for folder in "${locks%/*}" "$locks"; do
        mkdir -m 700 "$folder" 2>/dev/null
        case $(ls -ldn "$folder") in
            drwx------*) [ ! -O "$folder" ] || continue ;;
        esac
        echo "no $folder: it must be a folder of this login's own that no other may enter"
        return 1
    done
}

supervise() { # ARGUMENT…: from the first process to the last
    trap '' HUP
    now
    began=$now
    (first "$@") &
    child=$!
    myself
    born "$myself"
    mine=$born
    born "$child"
    booted
    printf '%s %s %s\n%s\n%s\n' "$limit" "$idle" "$began" "$metrics" "$log" >"$here/spec"
    printf '%s %s %s %s %s .\n' "$myself" "$mine" "$child" "${born:--}" "$booted" >"$here/pid"
    ooms
    before=$ooms
    clock
    now
    started=$clock lag=$((now - began))
    wait "$child"
    code=$?
    now
    times >"$here/times"
    reason='' signal=- detail='' user=0 system=0 peak=0
    { read -r reason rest <"$here/stopping"; } 2>/dev/null
    pids "$name"
    strays=0
    for pid in $pids; do strays=$((strays + 1)); done
    took=$((now - began - 1))
    first_born=''
    if [ "$strays" -gt 0 ] || kill -0 -- "-$child" 2>/dev/null; then
        [ -n "$reason" ] || kill -TERM -- "-$child" 2>/dev/null
        end_rest "$name" "$child" $stray_grace
    fi
    if [ "$code" -gt 128 ] && [ "$code" -le 192 ]; then
        signal=$((code - 128))
        ooms
        if [ -z "$reason" ] && [ "$signal" = 9 ] && [ "$ooms" != "$before" ]; then reason=oom; fi
        reason=${reason:-signal}
    fi
    { read -r detail <"$here/why"; } 2>/dev/null
    { read -r rest && read -r user system; } 2>/dev/null <"$here/times"
    { read -r peak <"$here/peak"; } 2>/dev/null
    exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- # its locks are free before anybody hears of its end
    write_end "$name" "$code $signal ${reason:-exit} $started $lag $took ${user:-0}+${system:-0} ${peak:-0} $strays $detail"
}

first() { # ARGUMENT…: becomes the command
    trap - HUP INT QUIT
    cd -- "$cwd" 2>/dev/null || fail "cannot enter the directory $cwd"
    true 2>/dev/null >>"$log" || fail "cannot write to $log"
    unset PATH PWD OLDPWD SHLVL locked # some shells hand them on, whether somebody gave them or not
    exec >>"$log" 2>&1
    # Without job control a shell has what it starts in the background ignore SIGINT, and some cannot undo it; bash adds a variable of its own.
    case $1 in
        *=*) ;;
        *) if [ -n "$BASH_VERSION" ]; then set -- /usr/bin/env -u _ "$@"; elif [ -n "$able" ]; then set -- /usr/bin/env "$able" "$@"; fi ;;
    esac
    set -- $setsid "$@"
    cookie=$name@$root:
    environment 2>/dev/null # from here on no variable is ours
    exec "$@"
}

fail() { # WORDS: what keeps a command from starting
    case $1 in *"$newline"*) set -- "${1%%"$newline"*}…" ;; esac
    printf '%s\n' "$1" >"$root/$here/why"
    exit 126
}

write_end() { # NAME FIELDS
    printf '%s .\n' "$2" 1<>"jobs/$1/exit"
    true >"jobs/$1/over"
    how "$1"
    for fifo in watch/*; do
        [ ! -p "$fifo" ] || printf '%s %s %s .\n' "$how" "$1" "$2" 1<>"$fifo"
    done
}

how() { # NAME: how its end is told: over, or mute when it printed nothing, which saves us a question about its log
    how=over
    log=''
    { read -r rest && IFS= read -r rest && IFS= read -r log; } 2>/dev/null <"jobs/$1/spec"
    if [ -f "$log" ] && [ ! -s "$log" ]; then how=mute; fi
}

end_rest() { # NAME GROUP GRACE: nothing of the job is alive afterwards.  With what is `left` of it found; GROUP may be empty
    for pid in $pids; do kill -TERM "$pid" 2>/dev/null && kill -CONT "$pid" 2>/dev/null; done
    now
    kill_at=$((now + $3)) killed='' shy=$((now + shy_grace))
    while [ -n "$pids" ] || { [ -n "$2" ] && [ -z "$killed" ] && kill -0 -- "-$2" 2>/dev/null; }; do
        now
        [ -n "$pids" ] || [ -z "$proc" ] || [ "$now" -lt "$shy" ] || kill_at=$now
        if [ "$now" -ge "$kill_at" ]; then
            [ -z "$killed" ] || return 0
            killed=yes kill_at=$((now + hopeless))
        fi
        if [ -n "$killed" ]; then
            [ -z "$2" ] || kill -KILL -- "-$2" 2>/dev/null
            for pid in $pids; do kill -KILL "$pid" 2>/dev/null; done
        fi
        sleep 0.02 2>/dev/null || sleep 1
        left "$1"
    done
}

left() { # NAME: pids, with the first process, which has no cookie until it has become the command
    pids "$1"
    [ -n "$first_born" ] || return 0
    born "$first"
    case "$born:$pids " in
        ":"* | *" $first "*) ;;
        "$first_born:"*) pids="$pids $first" ;;
    esac
}

halt() { # NAME REASON GRACE: SIGTERM now, SIGKILL after the grace; asked again, the earlier end of it holds
    [ -d "jobs/$1" ] || return 0
    tries=0
    until owned "$1" || [ $tries -ge 50 ]; do
        sleep 0.02
        tries=$((tries + 1))
    done
    ! ended "$1" && owned "$1" || return 0
    now
    at=$((now + $3)) why='' kill_at=''
    { read -r why kill_at <"jobs/$1/stopping"; } 2>/dev/null
    if [ -z "$kill_at" ] || [ "$at" -lt "$kill_at" ]; then printf '%s %s\n' "${why:-$2}" "$at" >"jobs/$1/stopping"; fi
    [ -n "$kill_at" ] || { send TERM && send CONT; }
    [ "$3" -gt 0 ] || finish_off "$1"
}

send() { # SIGNAL: to the group of the job that is `owned`, or to its first process while it has no group yet
    born "$first"
    if [ "$born" = "$first_born" ]; then kill "-$1" -- "-$first" 2>/dev/null || kill "-$1" "$first" 2>/dev/null; fi
}

finish_off() { # NAME
    send KILL
    pids "$1"
    for pid in $pids; do kill -KILL "$pid" 2>/dev/null; done
}

bury() { # NAME: nobody looks after it any more
    claimed "$1" && ! ended "$1" || return 0
    first='' first_born='' at_boot='' group=''
    owned "$1"
    booted
    [ "$at_boot" = "$booted" ] || first_born=''
    left "$1"
    if [ -n "$first_born" ]; then
        # A number is not given again while a group has it: if somebody else has it now, our group is gone.
        born "$first"
        case $born in '' | "$first_born") group=$first ;; esac
    fi
    strays=0
    for pid in $pids; do strays=$((strays + 1)); done
    if [ "$strays" -gt 0 ]; then
        [ -z "$group" ] || kill -TERM -- "-$group" 2>/dev/null
        end_rest "$1" "$group" $lost_grace
    fi
    write_end "$1" "- - lost 0 0 0 0+0 0 $strays "
}

claimed() { # NAME: whether the end of this job is ours to write, and not that of somebody else who found it lost, and lives
    set -C
    { printf '%s\n' $$ >"jobs/$1/claim"; } 2>/dev/null
    set +C
    other=''
    { read -r other <"jobs/$1/claim"; } 2>/dev/null
    case $other in '' | $$) return 0 ;; esac # nothing can be written on a full disk
    born "$other"
    [ -z "$born" ] || return 1
    printf '%s\n' $$ >"jobs/$1/claim"
}

cared_for() { # NAME: whether somebody looks after it, who is `owned`
    booted
    [ "$at_boot" = "$booted" ] || return 1
    born "$keeper"
    [ -n "$born" ] && [ "$born" = "$keeper_born" ]
}

# --- the keeper

ensure_keeper() {
    [ -z "$locked" ] || return 0
    pid='' its=''
    { read -r pid its <keeper/pid; } 2>/dev/null
    if [ -n "$pid" ]; then
        born "$pid"
        if [ -n "$born" ] && [ "$born" = "$its" ]; then return; fi
    fi
    $setsid $shell -c 'digest=$1 boot_id=$2 shell=$3; . "./bin/$1"; keep' recipe "$digest" "$boot_id" "$shell" </dev/null >/dev/null 2>&1 &
}

keep() { # Until there is nothing left to keep
    trap '' HUP
    mkdir -p keeper jobs watch
    born $$
    mine="$$ $born"
    printf '%s\n' "$mine" >keeper/pid
    now
    busy=$now beat_at=$now heard=$now fresh=''
    true >keeper/heard
    prune
    while [ -d jobs ]; do
        { read -r own <keeper/pid; } 2>/dev/null
        [ "$own" = "$mine" ] || return
        now
        tick=$now nap=1 unowned=$fresh fresh='' beat=''
        if [ "$tick" -ge "$beat_at" ]; then beat=yes beat_at=$((tick + beat_every)); fi
        for here in jobs/*; do
            if [ -d "$here" ] && [ ! -e "$here/over" ]; then
                busy=$tick
                look_after "${here##*/}"
            fi
        done
        last_words=''
        [ ! -f deadman ] || look_for_contact
        if [ -z "$last_words" ] && [ $((tick - busy)) -ge $linger ]; then
            rm -f keeper/pid keeper/disarmed
            [ ! -f deadman ] || mv deadman keeper/disarmed # with nothing to end and nothing to say, it is over: the next job sets its own
            # Whoever began a job after we looked for jobs has seen us alive: look again, now that nobody can.
            now_busy=''
            for here in jobs/*; do
                if [ -d "$here" ] && [ ! -e "$here/over" ] && ! ended "${here##*/}"; then now_busy=yes; fi
            done
            [ -n "$now_busy" ] || return
            [ -f deadman ] || [ ! -f keeper/disarmed ] || mv keeper/disarmed deadman
            printf '%s\n' "$mine" >keeper/pid
        fi
        sleep $nap 2>/dev/null || sleep 1
    done
}

look_after() { # NAME
    if ended "$1"; then
        true >"$here/over"
        return
    fi
    if ! owned "$1"; then
        case $unowned in *" $1 "*) bury "$1" ;; *) fresh="$fresh $1 " ;; esac
        return
    fi
    if ! cared_for "$1"; then
        ended "$1" || bury "$1"
        return
    fi
    limit=- idle=- began=0 metrics='' kill_at=''
    { read -r limit idle began && IFS= read -r metrics && IFS= read -r log; } <"$here/spec"
    limit=${limit:--} idle=${idle:--} began=${began:-$tick} # on a full disk nothing was written
    { read -r why kill_at <"$here/stopping"; } 2>/dev/null
    if [ -n "$kill_at" ]; then
        if [ "$tick" -ge "$kill_at" ]; then finish_off "$1"; else soon "$kill_at"; fi
    else
        if [ "$limit" != - ]; then
            if [ $((tick - began)) -gt "$limit" ]; then halt "$1" timeout $limit_grace; else soon $((began + limit)); fi
        fi
        [ "$idle" = - ] || look_idle "$1"
    fi
    if [ -n "$beat" ] || [ ! -e "$here/latest.json" ]; then show_life "$1"; fi
}

soon() { # TIME: the next look is not long after it
    [ $(($1 - tick)) -ge 100 ] || nap=0.1
}

look_idle() { # NAME
    quiet=''
    { read -r quiet <"$here/quiet"; } 2>/dev/null
    if [ -z "$quiet" ] || [ "$log" -nt "$here/quiet" ]; then
        quiet=$tick
        printf '%s\n' "$tick" >"$here/quiet"
    fi
    if [ $((tick - quiet)) -gt "$idle" ]; then halt "$1" idle $limit_grace; else soon $((quiet + idle)); fi
}

show_life() { # NAME: latest.json, and the most memory that a process of it has used so far
    clock
    record=''
    [ -z "$metrics" ] || [ ! -f "$metrics" ] || record=$(tail -c 65536 -- "$metrics" 2>/dev/null | {
        whole=''
        while IFS= read -r line; do whole=$line; done
        printf '%s' "$whole"
    })
    case $record in '{'*'}') ;; *) record='' ;; esac
    number step "$record"
    shown=$number
    number progress "$record"
    printf '{"time": %s%s%s%s}\n' "$clock" "$shown" "$number" "${record:+, \"metrics\": $record}" >"$here/latest.new" &&
        mv -f "$here/latest.new" "$here/latest.json"
    pids "$1"
    [ -n "$pids" ] || return 0
    files=''
    for pid in $pids; do files="$files /proc/$pid/status"; done
    peak=0
    { read -r peak <"$here/peak"; } 2>/dev/null
    peak=${peak:-0}
    for size in $(grep -hs '^VmHWM:' $files); do
        case $size in *[!0-9]*) ;; *) [ "$size" -le "$peak" ] || peak=$size ;; esac
    done
    printf '%s\n' "$peak" >"$here/peak"
}

number() { # NAME RECORD: a member of that name, as it stands in the record, to be put into another
    number=''
    case $2 in *"\"$1\":"*) ;; *) return 0 ;; esac
    value=${2#*"\"$1\":"}
    value=${value%%[,\}]*}
    value=${value# }
    case $value in '' | *[!0-9.eE+-]*) ;; *) number=", \"$1\": $value" ;; esac
}

look_for_contact() {
    allowed=''
    { read -r allowed && IFS= read -r last_words; } <deadman
    if [ contact -nt keeper/heard ]; then
        true >keeper/heard
        heard=$tick
        return
    fi
    if [ -n "$allowed" ] && [ $((tick - heard)) -gt "$allowed" ]; then
        rm -f deadman
        for here in jobs/*; do
            if [ -d "$here" ] && [ ! -e "$here/over" ]; then
                echo "nobody asked after it for $((allowed / 100)) seconds" >"$here/why"
                halt "${here##*/}" stopped $limit_grace
            fi
        done
        patience=$((limit_grace / 10))
        for here in jobs/*; do
            while [ -d "$here" ] && ! ended "${here##*/}" && [ $patience -gt 0 ]; do
                sleep 0.1
                patience=$((patience - 1))
            done
            if [ -d "$here" ] && ! ended "${here##*/}" && owned "${here##*/}"; then finish_off "${here##*/}"; fi
        done
        [ -z "$last_words" ] || $shell -c "$last_words" </dev/null >/dev/null 2>&1
    fi
}

prune() { # What has been over for long
    kept=0
    for name in $(ls -t jobs); do
        kept=$((kept + 1))
        if [ $kept -gt $keep_ends ] && [ -e "jobs/$name/over" ]; then rm -rf "jobs/$name"; fi
    done
    for fifo in watch/*; do
        born "${fifo#watch/}"
        [ -n "$born" ] || rm -f "$fifo"
    done
}

# --- the other verbs

stop() { # NAME GRACE
    halt "$1" stopped "$2"
    ensure_keeper
}

log() { # NAME FILE OFFSET COUNT: FILE is empty where the host chose
    set -- "${2:-jobs/$1/log}" "$3" "$4"
    [ -e "$1" ] || return 0
    [ -r "$1" ] || {
        printf '%s: Permission denied\n' "$1" >&2
        return 1
    }
    tail -c "+$(($2 + 1))" -- "$1" | head -c "$3"
}

watch() { # Answers lines: `? NAME` with going, over or mute; `.` with a dot.  Tells every end until its input ends
    trap '' HUP PIPE
    mkdir -p watch
    fifo=watch/$$
    rm -f "$fifo"
    mkfifo "$fifo" || return
    exec 3<>"$fifo" 4<&0
    (
        while IFS= read -r line; do printf '%s\n' "$line" >&3; done
        echo bye >&3
    ) <&4 >/dev/null 2>&1 &
    exec 4<&-
    echo ready
    while IFS= read -r line <&3; do
        case $line in
            '? '*) tell "${line#? }" ;;
            'over '* | 'mute '*) printf '%s\n' "$line" ;;
            .)
                true >contact
                ensure_keeper
                echo .
                ;;
            *) break ;;
        esac || break
    done 2>/dev/null
    rm -f "$fifo"
}

tell() { # NAME
    if ended "$1"; then
        tell_end "$1"
    elif [ ! -d "jobs/$1" ]; then
        printf 'over %s - - lost 0 0 0 0+0 0 0  .\n' "$1"
    elif ! owned "$1" || cared_for "$1" || ended "$1"; then
        # One that ended just now is told by whoever looked after it, or by the line that is already in the fifo.
        if ended "$1"; then tell_end "$1"; else printf 'going %s\n' "$1"; fi
    else
        bury "$1" # which tells us too, among all who listen
    fi
}

tell_end() { # NAME, which is ended
    how "$1"
    printf '%s %s %s\n' "$how" "$1" "$ended"
}

arm() { # HUNDREDTHS COMMAND: without contact for that long, all jobs here are ended and the command is run
    { printf '%s\n%s\n' "$1" "$2" >deadman; } 2>/dev/null
    ensure_keeper
}
# end
