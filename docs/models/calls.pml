/* What every collective does first and last: sequence, verify, post, arrive, mismatch, recovery.
 * Each rank makes calls without end; README.md maps the names to the code's, and lists the switches.
 */
#ifndef P
#define P 2		/* ranks */
#endif
#ifndef R
#define R 2		/* layout.RING */
#endif
#ifndef ODDS
#define ODDS 1		/* how many calls in all may differ from the other ranks' */
#endif
#ifndef KINDS
#define KINDS 255	/* which kinds of calls, as bits */
#endif
#ifndef TURNS
#define TURNS 4		/* even; sequence numbers wrap after P times as many times round the ring */
#endif
#ifndef AHEAD
#define AHEAD 1		/* layout.AHEAD: how many calls may have been posted and not ended */
#endif
#ifndef VERIFY_AFTER
#if defined(LATE_VERIFY)
#define VERIFY_AFTER (R - AHEAD + 2)
#elif defined(AS_IF_NOT_AHEAD)
#define VERIFY_AFTER R
#else
#define VERIFY_AFTER (R - AHEAD + 1)
#endif
#endif

#define N_SLOTS (P * R)
#define M (N_SLOTS * TURNS)
#define PLUS(a, b) (((a) + (b)) % M)
#define BEHIND(value, target) (((value) + M - (target)) % M >= M / 2)	/* flags.behind */
#define SLOT(s, r) (((s) % R) * P + (r))				/* calls.slot_of */
#define PAYLOAD_SLOT(s, r) (((s) % R) * P + ((r) + (s) / R) % P)	/* steps.payload_of */
#define CONTENT(s, r) ((s) * P + (r) + 1)				/* 0: anything else */

#define SYNC 0		/* all_reduce, all_gather, all_to_all, reduce_scatter, barrier, exchange */
#define FROM_FIRST 1	/* broadcast, scatter; root 0 */
#define FROM_LAST 2	/* root P - 1 */
#define TO_FIRST 3	/* gather, reduce */
#define TO_LAST 4
#define SCAN 5
#define SYMMETRIC 6	/* reads arenas or processes: `wait_all_done` */
#define NONE 7
#define HAS(kind) ((KINDS >> (kind)) & 1)
#define ROOT(kind) (((kind) == FROM_FIRST || (kind) == TO_FIRST) -> 0 : P - 1)
#define IS_FROM(kind) ((kind) == FROM_FIRST || (kind) == FROM_LAST)
#define IS_TO(kind) ((kind) == TO_FIRST || (kind) == TO_LAST)
#define SENDS(kind, r) ((kind) == SYNC || (kind) == SCAN || (IS_FROM(kind) && (r) == ROOT(kind)) || (IS_TO(kind) && (r) != ROOT(kind)))
#if defined(IN_LINE)		/* payloads up to INLINE_BYTES, beside the header's word */
#define PLACE(kind, s, r) SLOT(s, r)
#elif defined(OWN_SLOTS)
#define PLACE(kind, s, r) ((kind) == SYNC -> PAYLOAD_SLOT(s, r) : SLOT(s, r))
#else
#define PLACE(kind, s, r) PAYLOAD_SLOT(s, r)
#endif

/* steps.goes_ahead: whether this rank may end such a call before all have arrived. */
#define GOES_AHEAD(kind, r) ((kind) == SCAN || IS_FROM(kind) || (IS_TO(kind) && (r) != ROOT(kind)))

#define OK 0
#define EVENT 1
#define MISMATCH 2
#define ENDED 3

/* What the ranks share. */
byte header_sequence[N_SLOTS], header_digest[N_SLOTS];	/* one 64-bit exchange */
bit goes_ahead[N_SLOTS];				/* the record's state, until the call is done */
byte payload[N_SLOTS];
byte done[P];						/* STATUS_DONE */
byte event;						/* EVENT_WORD's generation */
bit aborted;						/* EVENT_ABORT */
byte answer_event[2 * P], answer_sequence[2 * P];	/* STATUS_ACKNOWLEDGED */
byte memory[P];						/* an array that others read where it lies */

/* Of each rank alone (Context): here, so that the properties can look at them. */
byte sequence[P];					/* sequence */
byte seen[P];						/* event_seen */

/* Of the properties alone. */
byte header_generation[N_SLOTS];			/* after which event a header was posted */
byte plan[2 * R] = NONE;				/* what all are to call, by sequence number */
byte odds;
byte agreed_event[2], agreed_sequence[2];
byte raised_event[2], raised_in[2];			/* in which call all raise it */
bit dead[P], has_ended[P];

#ifdef KILL
#define LIVES provided (!dead[me])
#else
#define LIVES
#endif
#ifdef ONE_ANSWER
#define ANSWER(r, e) (r)
#else
#define ANSWER(r, e) (2 * (r) + (e) % 2)
#endif

/* entries.pending.post_ahead: what would have to wait is not posted ahead. */
#define MAY_POST (n_posted == 0 || (n_posted < AHEAD && (PLUS(last, 1) + M - verified) % M < VERIFY_AFTER))

inline choose(kind) {
  if
  :: HAS(SYNC) -> kind = SYNC
  :: HAS(FROM_FIRST) -> kind = FROM_FIRST
  :: HAS(FROM_LAST) -> kind = FROM_LAST
  :: HAS(TO_FIRST) -> kind = TO_FIRST
  :: HAS(TO_LAST) -> kind = TO_LAST
  :: HAS(SCAN) -> kind = SCAN
  :: HAS(SYMMETRIC) -> kind = SYMMETRIC
  fi
}

/* The next sequence number, and what this rank calls: as the others, or for once something else. */
inline take_sequence() {
  atomic {
    s = PLUS(last, 1); sequence[me] = s; last = s;
    if :: calls <= R -> calls++ :: else fi;
    j = 0; is_first = 1; is_last = 1;
    do
    :: j < P ->
       if
       :: j != me && BEHIND(sequence[j], s) -> is_last = 0
       :: j != me && !BEHIND(sequence[j], s) -> is_first = 0
       :: else
       fi;
       j++
    :: else -> break
    od;
    if
    :: is_first -> choose(kind); plan[s % (2 * R)] = kind
    :: else -> kind = plan[s % (2 * R)]
    fi;
    assert(kind != NONE);
    if :: is_last -> plan[s % (2 * R)] = NONE :: else fi;
    mine = 0;
    if :: odds < ODDS -> odds++; mine = odds; choose(kind) :: true fi;
    j = 0; is_first = 0; is_last = 0
  }
}

/* flags.wait_header, of rank j: first the sequence number, then the whole word once more. */
inline wait_header(q, digest) {
  if
  :: !BEHIND(header_sequence[SLOT(q, j)], q) ->
     atomic {
       assert(header_generation[SLOT(q, j)] == seen[me]);
       if
       :: header_sequence[SLOT(q, j)] == q && header_digest[SLOT(q, j)] != digest -> status = MISMATCH
       :: else -> status = OK
       fi
     }
#ifdef EVENT_FIRST
  :: event != seen[me] -> status = EVENT
#else
  :: event != seen[me] && BEHIND(header_sequence[SLOT(q, j)], q) -> status = EVENT
#endif
  :: aborted -> status = ENDED
#ifdef KILL
  :: dead[j] && BEHIND(header_sequence[SLOT(q, j)], q) -> aborted = 1; status = ENDED
#endif
  fi
}

/* calls.verify: every call after `verified` and before `s`. */
inline verify() {
  q = PLUS(verified, 1);
  do
  :: q != s ->
     digest = header_digest[SLOT(q, me)]; j = 0;
     do
     :: j < P ->
        if
        :: j != me ->
           wait_header(q, digest);
           if :: status != OK -> goto failed :: else fi
        :: else
        fi;
        j++
     :: else -> break
     od;
     q = PLUS(q, 1)
  :: else -> break
  od;
  atomic { verified = PLUS(s, M - 1); q = 0; j = 0; digest = 0 }
}

/* calls.wait_all_arrived: after a mismatch too all must have arrived. */
inline wait_all_arrived() {
  j = 0; worst = OK;
  do
  :: j < P ->
     if
     :: j != me ->
        wait_header(s, mine);
        if
        :: status == MISMATCH -> atomic { worst = MISMATCH; q = s }
        :: status == EVENT || status == ENDED -> goto failed
        :: else
        fi
     :: else
     fi;
     j++
  :: else -> break
  od;
  status = worst; worst = OK; j = 0;
  if :: status != OK -> goto failed :: else fi;
  verify();
  verified = s
}

inline write_payload() {
  payload[PLACE(kind, s, me)] = 0;	/* half written; or nothing that anybody may read */
  if :: SENDS(kind, me) -> payload[PLACE(kind, s, me)] = CONTENT(s, me) :: else fi
}

inline post() {
  atomic {
    header_sequence[SLOT(s, me)] = s; header_digest[SLOT(s, me)] = mine;
    header_generation[SLOT(s, me)] = seen[me]; goes_ahead[SLOT(s, me)] = GOES_AHEAD(kind, me)
  }
}

/* Never a wrong number: what is read of rank j is its payload of this call. */
inline read(j) {
  if
  :: kind == SYMMETRIC -> assert(memory[j] == s)
  :: SENDS(kind, j) -> assert(payload[PLACE(kind, s, j)] == CONTENT(s, j))
  :: else
  fi
}

/* The slot is free: nobody still reads it, and nobody still has to compare the header in it. */
inline check_slot_is_free() {
  atomic {
    j = 0;
    do
    :: j < P ->
       if
       :: j != me && calls > R ->
          assert(!BEHIND(done[j], PLUS(s, M - R)));
          assert(header_sequence[SLOT(s, j)] != PLUS(s, M - R)
            || header_digest[SLOT(s, j)] == header_digest[SLOT(s, me)])
       :: else
       fi;
       j++
    :: else -> break
    od;
    j = 0
  }
}

/* recovery.announce: an event where all raise the mismatch in call q, else the end. */
inline announce() {
  atomic {
    j = 0; is_first = 1;
    do
    :: j < P ->
       if
       :: header_sequence[SLOT(q, j)] != q || goes_ahead[SLOT(q, j)] || !BEHIND(done[j], q) -> is_first = 0
       :: else
       fi;
       j++
    :: else -> break
    od;
#ifdef GOES_ON
    is_first = 1;
#endif
    if
    :: !is_first -> aborted = 1
    :: is_first && event == seen[me] -> event = seen[me] + 1
    :: else
    fi;
    j = 0; is_first = 0
  }
}

proctype rank(byte me) LIVES {
  byte s, verified, calls, kind, mine, j, q, digest, status, worst, highest;	/* calls: since the start, at most R + 1 */
  byte last, n_posted, kinds[AHEAD], digests[AHEAD];	/* s: the call that is posted or ended; last: sequence */
  bit is_first, is_last;
again:
  do
  :: event != seen[me] && n_posted == 0 -> s = PLUS(last, 1); goto answer
  :: aborted -> goto ended
#ifdef MESSAGES
  :: event != seen[me] && answer_event[ANSWER(me, event)] != event ->	/* messages._answer */
     q = event; answer_sequence[ANSWER(me, q)] = last; answer_event[ANSWER(me, q)] = q; q = 0
#endif
  :: event == seen[me] && !aborted && MAY_POST ->
     take_sequence();
#ifndef NO_VERIFY
     if :: n_posted == 0 && (s + M - verified) % M >= VERIFY_AFTER -> verify() :: else fi;
#endif
#ifndef UNCHECKED
     check_slot_is_free();
#endif
#ifdef EARLY_POST
     post(); write_payload();
#else
     write_payload();
     if :: kind == SYMMETRIC -> memory[me] = s :: else fi;
     post();
#endif
     atomic { kinds[n_posted] = kind; digests[n_posted] = mine; n_posted++; kind = SYNC; mine = 0 }
  :: !aborted && n_posted > 0 ->	/* the oldest is ended */
     atomic {
       s = PLUS(last, M + 1 - n_posted); kind = kinds[0]; mine = digests[0];
       j = 1;
       do
       :: j < n_posted -> kinds[j - 1] = kinds[j]; digests[j - 1] = digests[j]; j++
       :: else -> break
       od;
       n_posted--; kinds[n_posted] = 0; digests[n_posted] = 0; j = 0
     }
     if
     :: kind == SYNC || kind == SYMMETRIC || (IS_TO(kind) && me == ROOT(kind)) ->
        wait_all_arrived();
        j = 0;
        do
        :: j < P -> if :: j != me -> read(j) :: else fi; j++
        :: else -> break
        od;
        j = 0;
        if
        :: kind == SYMMETRIC ->
           done[me] = s;
#ifndef NO_WAIT_ALL_DONE
           do
           :: j < P ->
              if
              :: !BEHIND(done[j], s)
              :: event != seen[me] -> goto failed
              :: aborted -> goto failed
#ifdef KILL
              :: dead[j] && BEHIND(done[j], s) -> aborted = 1; goto failed
#endif
              fi;
              j++
           :: else -> break
           od;
#endif
           atomic { j = 0; memory[me] = 0 }
        :: else
        fi
     :: kind == SCAN || (IS_FROM(kind) && me != ROOT(kind)) ->	/* wait_arrived */
        j = (kind == SCAN -> 0 : ROOT(kind));
        do
        :: (kind == SCAN && j < me) || (kind != SCAN && j == ROOT(kind)) ->
           wait_header(s, mine);
           if
           :: status == MISMATCH -> wait_all_arrived(); assert(false)
           :: status == EVENT || status == ENDED -> goto failed
           :: else
           fi;
           j++
        :: else -> break
        od;
        j = (kind == SCAN -> 0 : ROOT(kind));
        do
        :: (kind == SCAN && j < me) || (kind != SCAN && j == ROOT(kind)) -> read(j); j++
        :: else -> break
        od;
        j = 0
     :: else				/* this rank needs nobody */
     fi;
     atomic { done[me] = s; kind = SYNC; mine = 0 }
  od;
failed:
  atomic { memory[me] = 0; j = 0; digest = 0; worst = OK }	/* the call is over: its array is used anew */
  if
  :: status == ENDED || aborted -> goto ended
  :: status == MISMATCH -> announce()
  :: else
  fi;
  q = 0;
  if :: aborted -> goto ended :: else fi;
answer:
  /* Never a call apart: all who go on raise the mismatch in the same call. */
  atomic {
    if
    :: raised_event[event % 2] == event -> assert(raised_in[event % 2] == s)
    :: else -> raised_event[event % 2] = event; raised_in[event % 2] = s
    fi
  }
  atomic {
    s = last; j = 0;	/* what was posted is void: the others may be in any of it */
    do :: j < n_posted -> kinds[j] = 0; digests[j] = 0; j++ :: else -> break od;
    n_posted = 0; j = 0
  }
  atomic { seen[me] = event; status = OK; kind = SYNC; mine = 0; answer_sequence[ANSWER(me, seen[me])] = s }
  answer_event[ANSWER(me, seen[me])] = seen[me];
  /* recovery.recover, at the next call */
#ifndef NO_WAIT_FOR_ANSWERS
  do
  :: j < P ->
     if
     :: answer_event[ANSWER(j, seen[me])] == seen[me] -> j++
     :: aborted -> goto ended
#ifdef KILL
     :: dead[j] && answer_event[ANSWER(j, seen[me])] != seen[me] -> aborted = 1; goto ended
#endif
     fi
  :: else -> break
  od;
#endif
  j = 0; highest = s;
  do
  :: j < P ->
     if
     :: BEHIND(highest, answer_sequence[ANSWER(j, seen[me])]) -> highest = answer_sequence[ANSWER(j, seen[me])]
     :: else
     fi;
     j++
  :: else -> break
  od;
  atomic {
#if defined(OWN_SEQUENCE)
    s = PLUS(s, R);
#elif defined(HIGHEST_ONLY)
    s = highest;
#else
    s = PLUS(highest, R);
#endif
    if
    :: agreed_event[seen[me] % 2] == seen[me] -> assert(agreed_sequence[seen[me] % 2] == s)
    :: else ->
       agreed_event[seen[me] % 2] = seen[me]; agreed_sequence[seen[me] % 2] = s;
       j = 0;
       do :: j < 2 * R -> plan[j] = NONE; j++ :: else -> break od
    fi;
    sequence[me] = s; verified = s; last = s; calls = 0; j = 0; highest = 0
  }
  goto again;
ended:
  has_ended[me] = 1
}

#ifdef KILL
active proctype killer() {
  if
  :: dead[0] = 1
  :: dead[P - 1] = 1
  fi
}

/* Nobody waits for ever for a rank that is gone (run pan with -E: the dead stand where they died). */
active proctype nobody_hangs() {
  byte r;
  timeout -> do :: r < P -> assert(dead[r] || has_ended[r]); r++ :: else -> break od
}
#endif

init {
  byte r;
  atomic { do :: r < P -> run rank(r); r++ :: else -> break od }
}
