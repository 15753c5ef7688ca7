/* Mailboxes and bells: senders that post without end, one receiver that takes, and their sleep.
 * README.md maps the names to the code's, and lists the switches.
 */
#ifndef SENDERS
#define SENDERS 1
#endif
#ifndef POSTS
#define POSTS 2		/* layout.POSTS */
#endif
#define M (2 * POSTS)	/* posts' numbers wrap */
#define RECEIVER SENDERS
#define RANKS (SENDERS + 1)
#define POST(sender, number) ((sender) * POSTS + (number) % POSTS)
#define NEXT(number) (((number) + 1) % M)
#define FILLED(head, tail) (((head) + M - (tail)) % M)

/* Each sender's mailbox. */
byte number[SENDERS * POSTS];		/* Envelope.NUMBER: 1 + the post's running number, 0: none yet */
byte data[SENDERS * POSTS];		/* 1 + the running number again; 0: half written */
byte head[SENDERS], known_tail[SENDERS];	/* MAILBOX_HEAD, MAILBOX_KNOWN_TAIL: the sender's alone */
byte tail[SENDERS];			/* MAILBOX_TAIL */
byte memory[SENDERS];			/* a message that is fetched: 1 + its post's number; 0: used anew */
bit is_fetched[SENDERS * POSTS];	/* Envelope.WAY */
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

inline post_number(p, value) {			/* mailboxes.advance_head */
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

/* sending.send_step: sets `moved`. */
inline send_step() {
  moved = 0;
  if
  :: waits_for_take ->
     if
     :: FILLED(tail[me], post) > 0 && FILLED(tail[me], post) <= POSTS ->	/* tail_of > POST */
        waits_for_take = 0; memory[me] = 0; moved = 1
     :: else
     fi
  :: else ->
     if
     :: FILLED(head[me], known_tail[me]) >= POSTS -> known_tail[me] = tail[me]	/* mailboxes.is_full */
     :: else
     fi;
     if
     :: FILLED(head[me], known_tail[me]) < POSTS ->
        post = head[me];
#ifdef NUMBER_FIRST
        post_number(POST(me, post), post + 1);
#endif
        if
        :: true ->
           is_fetched[POST(me, post)] = 0;
           data[POST(me, post)] = 0; data[POST(me, post)] = post + 1
        :: true ->
           memory[me] = post + 1; is_fetched[POST(me, post)] = 1; waits_for_take = 1
        fi;
        head[me] = NEXT(post);
#ifndef NUMBER_FIRST
        post_number(POST(me, post), post + 1);
#endif
#ifdef EARLY_REUSE
        if :: waits_for_take -> waits_for_take = 0; memory[me] = 0 :: else fi;
#endif
        moved = 1
     :: else
     fi
  fi
}

proctype sender(byte me) LIVES {
  byte post, rung;
  bit moved, waits_for_take;
  do
  :: aborted -> goto ended
  :: else ->
     send_step();
     if
     :: moved -> moved = 0
     :: else ->
        begin_to_sleep();
#ifndef NO_SECOND_LOOK
        send_step();
#endif
        if :: !moved -> sleep_until_rung() :: else -> moved = 0 fi;
        end_sleep()
     fi
  od;
ended:
  has_ended[me] = 1
}

/* receiving.receive_step: from whoever has posted. */
inline receive_step() {
  moved = 0; from = 0;
  do
  :: from < SENDERS && !moved ->
     post = tail[from];
     if
     :: number[POST(from, post)] == post + 1 ->	/* mailboxes.is_written */
#ifdef EARLY_TAIL
        tail[from] = NEXT(post); ring(from);
#endif
        if
        :: is_fetched[POST(from, post)] -> assert(memory[from] == post + 1 || dead[from])
        :: else -> assert(data[POST(from, post)] == post + 1)
        fi;
#ifndef EARLY_TAIL
        atomic {				/* mailboxes.advance_tail; what is taken is forgotten: fewer states */
          data[POST(from, post)] = 0; is_fetched[POST(from, post)] = 0; tail[from] = NEXT(post)
        }
        ring(from);
#endif
        moved = 1
     :: else -> from++
     fi
  :: else -> break
  od;
  from = 0; post = 0
}

proctype receiver(byte me) LIVES {
  byte post, from, rung;
  bit moved;
  do
  :: aborted -> goto ended
  :: else ->
     receive_step();
     if
     :: moved -> moved = 0
     :: else ->
        begin_to_sleep();
#ifndef NO_SECOND_LOOK
        receive_step();
#endif
        if :: !moved -> sleep_until_rung() :: else -> moved = 0 fi;
        end_sleep()
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
