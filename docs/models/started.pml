/* Started calls between the compiled thread, who waits, who starts and who closes (entries/pending.py,
 * entries/started.py, calls/work_queue.py, HostGroup.close). Each step of Python's is one statement;
 * README.md has the names.
 */
#ifndef N
#define N 2				/* calls */
#endif
#ifndef R
#define R 1				/* entries of the ring */
#endif
#ifndef WAITERS
#define WAITERS 1
#endif
#ifndef INTERRUPTS
#define INTERRUPTS 1
#endif
#define IDLE 0
#define BUSY 1
#define NEEDS_PYTHON 2
#define OK 1
#define BAD 2				/* a mismatch: the ranks agree, and go on */
#define WELL 1
#define FAILED 2
#define BIT(number) (1 << (number))
#define HAS(mask, number) (((mask) >> (number)) & 1)
#define STATUS(number) status[(number) % R]

byte state, tail, done, reaped;		/* Context.state, Pending.tail, done, reaped */
bit wants, is_running;			/* wanted is tail; is_running */
byte status[R];
byte runs;				/* the call that compiled code is in */
byte noted;				/* WorkQueue._works: a bit for each */
byte ended[N + 1];			/* Work._is_done, and how */
byte went[N + 1];			/* how it really went */
bit has_mismatched, is_lost;
bit is_aborted, is_given_up, is_closed, is_unmapped, is_removed;
bit is_pending;				/* Ctrl-C */
byte lock = 9;				/* who has _changed */

#define LOCK atomic { lock == 9 || lock == me -> lock = me }
#define UNLOCK lock = 9

inline end_work(number, how) {
  atomic {
    if
    :: !ended[number] ->
       assert(runs != number);			/* its arrays may be let go of */
       assert((how == WELL) == (went[number] == OK));	/* as it went, or it never ran */
       ended[number] = how
    :: else
    fi
  }
}

/* --- compiled: run_pending, end_running ----------------------------------------------------------- */

inline run_calls(until) {
  is_running = 1;
  do
  :: done < until ->
     atomic { assert(!is_unmapped && !ended[done + 1]); runs = done + 1 };
     atomic {
       if
       :: is_aborted -> went[runs] = BAD
       :: else ->
          if
          :: went[runs] = OK
#ifndef NO_LOSS
          :: !is_lost -> is_lost = 1; is_aborted = 1; went[runs] = BAD
#endif
          :: !has_mismatched -> has_mismatched = 1; went[runs] = BAD
          fi
       fi;
       STATUS(runs) = went[runs];
       is_bad = went[runs] == BAD;
       runs = 0
     };
     if
     :: is_bad -> break
     :: else -> done++
     fi
  :: else -> is_bad = 0; break
  od;
  if
  :: is_bad -> state = NEEDS_PYTHON; atomic { assert(done < tail); done++ }; is_running = 0
#ifdef SAYS_SO_LATE
  :: else -> state = IDLE; is_running = 0
#else
  :: else -> is_running = 0; state = IDLE
#endif
  fi;
  is_bad = 0
}

active proctype thread() {
  bit is_bad;
  do
  :: is_removed -> break
  :: atomic { wants && done < tail && state == IDLE && !is_removed -> state = BUSY } -> run_calls(tail)
  od
}

/* --- Python: WorkQueue ---------------------------------------------------------------------------- */

inline note_ended() {				/* the lock is held */
  atomic { place = reaped + 1; last = done };
  do
  :: place <= last ->
#ifdef WAITS_FOR_WHO_NOTES
     atomic { was = STATUS(place); if :: reaped == place - 1 -> reaped = place; is_mine = 1 :: else fi };
     if
     :: is_mine -> HAS(noted, place);
        atomic { noted = noted & ~BIT(place); is_mine = 0; end_work(place, was) }
     :: else
     fi;
#else
     if
     :: HAS(noted, place) ->
        was = STATUS(place);
#ifndef BELIEVES_THE_STATUS
        if
        :: place <= reaped -> was = OK
        :: else
        fi;
#endif
        end_work(place, was);
        atomic { if :: reaped == place - 1 -> reaped = place :: else fi }
     :: else
     fi;
#endif
     place++
  :: else -> break
  od;
  place = 1;
  do
  :: place <= N && place <= reaped ->
     if
     :: HAS(noted, place) ->
#ifndef LEAVES_TO_WHO_REAPED
        end_work(place, WELL);
        noted = noted & ~BIT(place)
#endif
     :: else
     fi;
     place++
  :: else -> break
  od;
  atomic { place = 0; last = 0; was = 0 }
}

inline settle_ended() {
  LOCK;
  note_ended();
  UNLOCK
}

inline end_calls() {			/* Group.end_calls */
  do
  :: atomic { state == IDLE -> state = NEEDS_PYTHON } -> break
  :: state == NEEDS_PYTHON -> break
  :: state == BUSY -> is_aborted = 1; state != BUSY
  od;
  is_removed = 1;			/* ProgressThread.remove */
  !is_running
}

inline fail_all() {
#ifndef LETS_RUN
  end_calls();
#endif
  LOCK;
  atomic { pending = noted };
#ifndef WAITS_FOR_WHO_NOTES
  note_ended();
#endif
#ifdef FAILS_WHAT_COMES
  pending = noted;
#endif
  atomic { place = 1; last = reaped };
  do
  :: place <= N ->
     atomic {
       if
       :: HAS(pending, place) ->
          end_work(place, (place <= last -> WELL : FAILED));
          noted = noted & ~BIT(place)
       :: else
       fi
     };
     place++
  :: else -> break
  od;
  atomic { place = 0; last = 0; pending = 0; UNLOCK }
}

inline settle_group() {
  if
  :: state == NEEDS_PYTHON ->
     !is_running;				/* StartedCalls.settle */
#ifndef WAITS_FOR_WHO_NOTES
     settle_ended();
#endif
     if						/* Group.check_usable */
     :: is_aborted || is_closed -> fail_all()
#ifdef GOES_ON_AFTER_THE_END
     :: else -> state = IDLE
#else
     :: else ->				/* HostGroup.go_on: under a lock, as `is_closed` is set */
        atomic { if :: state == NEEDS_PYTHON && !is_aborted && !is_closed -> state = IDLE :: else fi }
#endif
     fi
  :: else
  fi
}

/* started.wait_started: 0 if the call ended well and this has reaped it */
inline wait_compiled(number) {
  is_compiled = 1;
  do
  :: done >= number -> break
  :: else ->
     if
     :: atomic { state == IDLE -> state = BUSY } -> run_calls(number)
     :: state == NEEDS_PYTHON -> break
     :: state == BUSY -> done >= number || state != BUSY
     fi
  od;
  atomic {
    is_mine = 0;
    if
    :: done >= number && reaped == number - 1 && STATUS(number) == OK -> reaped = number; is_mine = 1
    :: else
    fi;
    is_compiled = 0
  }
}

inline wait_for(number) {
  do
  :: ended[number] -> break
  :: else ->
     wait_compiled(number);
     if
     :: is_mine ->
        end_work(number, WELL);
        atomic { noted = noted & ~BIT(number); is_mine = 0 }
     :: else ->
        settle_ended();
        if
        :: HAS(noted, number) -> settle_group()
        :: else
        fi
     fi
  od
}

active proctype starts() {
  byte number, place, last, was, pending, me = 1;
  bit is_bad, is_mine;
  do
  :: number < N && !is_closed ->
     number++;
     do
     :: atomic { tail - reaped < R && !is_closed ->	/* start_entry: one step of Python's */
          tail++; STATUS(tail) = 0; wants = 1 } -> break
     :: is_closed || is_aborted -> number = N; break
     :: else -> settle_ended(); settle_group()	/* makes room */
     od;
     if
     :: tail == number && number <= N && !HAS(noted, number) && !ended[number] ->
        noted = noted | BIT(number)			/* note_started: later */
     :: else
     fi
  :: else -> break
  od
}

proctype waits(byte me) {
  byte place, last, was, pending;
  bit is_bad, is_mine, is_compiled;
again:
  {
    HAS(noted, me - 1) || ended[me - 1] || is_closed;
    if
    :: HAS(noted, me - 1) || ended[me - 1] -> wait_for(me - 1)
    :: else
    fi
  } unless {
    atomic {					/* KeyboardInterrupt: between any two steps of Python's */
      is_pending && !is_compiled ->
      is_pending = 0; place = 0; last = 0; was = 0; pending = 0; is_mine = 0;
      if :: lock == me -> UNLOCK :: else fi
    };
    goto again
  }
}

active proctype closes() {
  byte number = 1, place, last, was, pending, me = 8;
  bit is_bad, is_mine;
  do						/* WorkQueue.stop */
  :: number <= N && !HAS(noted, number) -> number++
  :: number <= N && HAS(noted, number) ->
     do
     :: ended[number] -> break
     :: else -> settle_ended(); settle_group()	/* the thread runs it: `sleep_until` */
     :: is_given_up = 1; break			/* the deadline of close */
     od;
     number++
  :: is_given_up || number > N -> break
  od;
  if
  :: is_given_up -> is_aborted = 1; fail_all()	/* WorkQueue._give_up */
  :: else
  fi;
  settle_ended();				/* raise_unseen */
  is_closed = 1;				/* HostGroup._let_go */
  end_calls();
  is_unmapped = 1
}

#if INTERRUPTS > 0
active proctype interrupts() {
  if :: is_pending = 1 :: skip fi
}
#endif

init {					/* for the last call, and for those before it */
  byte n;
  atomic { do :: n < WAITERS -> run waits(N + 1 - n); n++ :: else -> break od }
}
