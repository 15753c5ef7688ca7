/* Mailboxes and bells: senders that post without end, one receiver that takes, and their sleep.
 * README.md maps the names to the code's, and lists the switches.
 */
#ifndef SENDERS
#define SENDERS 1
#endif
#ifndef SMALL
#define SMALL 3		/* places of the small ring; a record takes one or two */
#endif
#ifndef LARGE
#define LARGE 4		/* and of the large one */
#endif
#define TOTAL (SMALL + LARGE)
#define M 8		/* counters wrap; more than TOTAL */
#define STAMPS 2	/* messages' numbers wrap */
#define RECEIVER SENDERS
#define RANKS (SENDERS + 1)
#define START(ring) ((ring) * SMALL)
#define SIZE(ring) (SMALL + (ring) * (LARGE - SMALL))
#define AT(sender, ring, offset) ((sender) * TOTAL + START(ring) + (offset))
#define BETWEEN(later, earlier) (((later) + M - (earlier)) % M)
#define NEXT(stamp) ((stamp) % STAMPS + 1)
#define MESSAGE 1
#define FETCHED 2
#define TO_START 3
#define TO_OTHER 4
#define OLD 7		/* what data of before looks like where a number is expected */

/* Each sender's mailbox: two rings of places, in each of which a record may begin. */
byte number[SENDERS * TOTAL];		/* Envelope.number: 0: not written */
byte kind[SENDERS * TOTAL];		/* Envelope.packed: the way */
byte size[SENDERS * TOTAL];		/* places that it takes */
byte data[SENDERS * TOTAL];		/* the message's stamp; 0: half written */
byte tail[SENDERS];			/* MAILBOX_TAIL */
byte memory[SENDERS];			/* a message that is fetched: its stamp; 0: used anew */
bit acknowledged[SENDERS];
/* Each rank's bell. */
byte bell[RANKS], waiters[RANKS];
bit is_asleep[RANKS];			/* in the kernel, on the bell's futex */
bit dead[RANKS], has_ended[RANKS], aborted;

#ifdef KILL
#define LIVES provided (!dead[me])
#else
#define LIVES
#endif

inline ring(rank) {				/* flags.ring */
  if
#ifndef NO_RING
  :: waiters[rank] > 0 -> bell[rank]++; is_asleep[rank] = 0
#endif
  :: else
  fi
}

inline post_number(p, value) {			/* the end of mailboxes.publish */
#ifdef PLAIN_NUMBER
  if						/* the store becomes visible after the load of the waiters */
  :: waiters[RECEIVER] > 0 -> number[p] = value; ring(RECEIVER)
  :: else -> number[p] = value
  fi
#else
  number[p] = value;
  ring(RECEIVER)
#endif
}

inline begin_to_sleep() {			/* flags.begin_to_sleep */
#ifdef LATE_ANNOUNCEMENT
  rung = bell[me]
#else
  waiters[me]++;
  rung = bell[me]
#endif
}

inline sleep_until_rung() {			/* flags.sleep_until_rung, of which no slice ever ends */
#ifdef LATE_ANNOUNCEMENT
  waiters[me]++;
#endif
  atomic { if :: bell[me] == rung -> is_asleep[me] = 1 :: else fi };
  if
  :: !is_asleep[me]
  :: aborted -> goto ended
#ifdef KILL
  :: me != RECEIVER && dead[RECEIVER] -> aborted = 1; goto ended
  :: me == RECEIVER && (dead[0] || dead[SENDERS - 1]) -> aborted = 1; goto ended
#endif
  fi
}

inline end_sleep() {				/* flags.end_sleep */
  atomic { waiters[me]--; bell[me] = 0; rung = 0 }	/* nobody compares it any more: fewer states */
}

#define USED (BETWEEN(written, known) < BETWEEN(written, base) -> BETWEEN(written, known) : BETWEEN(written, base))
#ifdef NO_SPARE
#define NEEDED (skipped + n)
#else
#define NEEDED (skipped + n + 1)		/* the place behind it must say that it is not written */
#endif

inline clear(p) {
  assert(kind[p] != TO_OTHER && kind[p] != TO_START);	/* none that was not read */
#ifndef NO_CLEARING
  number[p] = 0
#else
  skip
#endif
}

/* mailboxes.place_record: sets `is_placed`; the record begins at `offset` of `which`. */
inline place_record() {
  is_placed = 0; tries = 0;
  do
  :: is_placed || tries == 3 -> break
  :: else ->
     tries++;
     skipped = (offset + n > SIZE(which) -> SIZE(which) - offset : 0);
     if
     :: USED + NEEDED > SIZE(which) || (skipped && which) ->
        known = tail[me];
        if				/* in the code they do not wrap */
        :: BETWEEN(written, known) < BETWEEN(written, base) -> base = known
        :: else
        fi
     :: else
     fi;
     if
     :: skipped && which && known == written -> go_to_other()
     :: else ->
        if
        :: USED + NEEDED <= SIZE(which) && !skipped -> is_placed = 1
        :: USED + NEEDED <= SIZE(which) && skipped ->	/* _go_to_start */
           clear(AT(me, which, 0));
           kind[AT(me, which, offset)] = TO_START;
           number[AT(me, which, offset)] = 1;
           written = (written + skipped) % M; offset = 0
#ifndef ONE_RING
        :: USED + NEEDED > SIZE(which) && !which -> go_to_other()
#endif
        :: else -> break
        fi
     fi
  od;
  tries = 0; skipped = 0
}

inline go_to_other() {				/* mailboxes._go_to_other */
  clear(AT(me, 1 - which, other));
  kind[AT(me, which, offset)] = TO_OTHER;
  number[AT(me, which, offset)] = 1;
  after = (offset + 1) % SIZE(which);
  written = (written + 1) % M;
#ifdef FORGETS_RECORD
  base = written;
#else
  base = (written + M - 1) % M;		/* where the other ring was left there may be such a record, too */
#endif
  offset = other; other = after; which = 1 - which; after = 0
}

/* sending.send_step: sets `moved`. A record of `n` places. */
inline send_step() {
  moved = 0;
  if
  :: waits_for_word ->
     if
     :: acknowledged[me] -> acknowledged[me] = 0; waits_for_word = 0; memory[me] = 0; moved = 1
     :: else
     fi
  :: else ->
#ifdef ONE_RING
     n = 1;
#else
     if :: n == 0 -> if :: n = 1 :: n = 2 fi :: else fi;
#endif
     atomic { place_record() };	/* a record that says where to go on is seen at once: fewer states */
     if
     :: is_placed ->
        p = AT(me, which, offset);
#ifdef NUMBER_FIRST
        post_number(p, 1);
#endif
        atomic {			/* nobody looks before the number is there */
        size[p] = n;
        if
        :: true -> kind[p] = MESSAGE; data[p] = stamp
        :: n == 1 -> kind[p] = FETCHED; memory[me] = stamp; waits_for_word = 1
        fi;
        if
        :: n == 2 -> number[p + 1] = OLD	/* its data lies there */
        :: else
        fi;
        offset = (offset + n) % SIZE(which); written = (written + n) % M;
        clear(AT(me, which, offset))
        };
#ifndef NUMBER_FIRST
        post_number(p, 1);
#endif
#ifdef EARLY_REUSE
        if :: waits_for_word -> waits_for_word = 0; memory[me] = 0 :: else fi;
#endif
        stamp = NEXT(stamp); n = 0; p = 0; is_placed = 0; moved = 1
     :: else
     fi
  fi
}

proctype sender(byte me) LIVES {
  byte which, offset, other, written, known, base, n, p, skipped, tries, after, rung;
  byte stamp = 1;
  bit moved, waits_for_word, is_placed;
  do
  :: aborted -> goto ended
  :: else ->
     send_step();
     if
     :: moved -> moved = 0
     :: else ->
#ifndef NO_BELLS
        begin_to_sleep();
#ifndef NO_SECOND_LOOK
        send_step();
#endif
        if :: !moved -> sleep_until_rung() :: else -> moved = 0 fi;
        end_sleep()
#else
        skip
#endif
     fi
  od;
ended:
  has_ended[me] = 1
}

/* mailboxes.written_record: sets `p` to the next record, or NONE. */
#define NONE 255
inline written_record() {
  atomic { do
  :: p = AT(from, in_ring[from], in_offset[from]);
     if
     :: number[p] == 0 -> p = NONE; break
     :: else ->
        assert(number[p] == 1 || dead[from]);	/* never data of before */
        if
        :: kind[p] == TO_START ->
           kind[p] = 0;
           taken[from] = (taken[from] + SIZE(in_ring[from]) - in_offset[from]) % M; in_offset[from] = 0
        :: kind[p] == TO_OTHER ->
           kind[p] = 0;
           taken[from] = (taken[from] + 1) % M;
           after = (in_offset[from] + 1) % SIZE(in_ring[from]);
           in_offset[from] = in_other[from]; in_other[from] = after; after = 0;
           in_ring[from] = 1 - in_ring[from]
        :: else -> break
        fi
     fi
  od }
}

/* receiving.receive_from: of whoever has written. */
inline receive_step() {
  moved = 0; from = 0;
  do
  :: from < SENDERS && !moved ->
     written_record();
     if
     :: p != NONE ->
        atomic {			/* what only this rank sees */
        is_fetched = kind[p] == FETCHED;
        taken[from] = (taken[from] + size[p]) % M;
        in_offset[from] = (in_offset[from] + size[p]) % SIZE(in_ring[from])
        };
#ifdef EARLY_TAIL
        tail[from] = taken[from]; ring(from);
#endif
        if
        :: is_fetched
        :: else -> assert(data[p] == expected[from])
        fi;
        atomic { kind[p] = 0; size[p] = 0; data[p] = 0 };	/* what is taken is forgotten: fewer states */
#ifndef EARLY_TAIL
        tail[from] = taken[from]; ring(from);	/* give_back: of what is fetched, before that */
#endif
        if
        :: is_fetched ->
           assert(memory[from] == expected[from] || dead[from]);
           acknowledged[from] = 1; ring(from)	/* acknowledge */
        :: else
        fi;
        expected[from] = NEXT(expected[from]); is_fetched = 0;
        moved = 1
     :: else -> from++
     fi
  :: else -> break
  od;
  from = 0; p = 0
}

proctype receiver(byte me) LIVES {
  byte in_ring[SENDERS], in_offset[SENDERS], in_other[SENDERS], taken[SENDERS], expected[SENDERS];
  byte p, after, from, rung;
  bit moved, is_fetched;
  expected[0] = 1; expected[SENDERS - 1] = 1;
  do
  :: aborted -> goto ended
  :: else ->
     receive_step();
     if
     :: moved -> moved = 0
     :: else ->
#ifndef NO_BELLS
        begin_to_sleep();
#ifndef NO_SECOND_LOOK
        receive_step();
#endif
        if :: !moved -> sleep_until_rung() :: else -> moved = 0 fi;
        end_sleep()
#else
        skip
#endif
     fi
  od;
ended:
  has_ended[me] = 1
}

#ifdef KILL
active proctype killer() {
  if
  :: dead[0] = 1
  :: dead[RECEIVER] = 1
  fi
}

/* Nobody waits for ever for a rank that is gone (run pan with -E: the dead stand where they died). */
active proctype nobody_hangs() {
  byte r;
  timeout -> do :: r < RANKS -> assert(dead[r] || has_ended[r]); r++ :: else -> break od
}
#endif

init {
  byte r;
  atomic {
    do :: r < SENDERS -> run sender(r); r++ :: else -> break od;
    run receiver(RECEIVER)
  }
}
