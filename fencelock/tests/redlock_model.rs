//! A model of Redlock as fencelock does it, explored exhaustively: clients, nodes, lost and late messages, leases that end, nodes that
//! restart with and without their memory. With both protections nobody ever holds beside somebody else and tokens grow; without one
//! of them the checker finds the disaster, which shows that it can.
//!
//! What the model leaves out: time itself. A lease ends at any moment after which its holder no longer believes in it, and a quarantine
//! ends when all that began before the restart is over; that is what deadlines and `max_ttl` are for. A message that is never delivered
//! is lost, and one that is delivered after its attempt has ended is late.

#![cfg(feature = "redlock")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use stateright::{Checker, Model, Property};

const NODES: usize = 3;
const MAJORITY: u32 = 2;
const CLIENTS: usize = 2;
/// A client makes so many attempts at most.
const ATTEMPTS: usize = 2;

/// An attempt of a client: a token for an owner.
type Attempt = usize;
/// A set of attempts, or of nodes.
type Set = u8;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Node {
    holder: Option<Attempt>,
    /// The highest proposal that it accepted, and whose.
    highest: Option<(u8, Attempt)>,
    /// After a restart without memory it does not vote until these are over.
    quarantine: Option<Set>,
    /// Only proposals above this are votes: those made when whatever it forgot was over.
    floor: u8,
    /// Requests and votes on their way.
    asked: Set,
    granted: Set,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
enum Phase {
    #[default]
    Idle,
    /// The votes of these nodes are in.
    Asks(Set),
    Holds,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Client {
    phase: Phase,
    /// The highest token that it was told of.
    seen: u8,
    attempts: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct World {
    nodes: [Node; NODES],
    clients: [Client; CLIENTS],
    tokens: [u8; CLIENTS * ATTEMPTS],
    restarts: u8,
    /// The newest token that was granted, and how many were.
    newest: u8,
    grants: u8,
    grown: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Propose(usize),
    /// A request reaches a node.
    Ask(Attempt, usize),
    /// A vote reaches the client.
    Vote(Attempt, usize),
    /// A client gives up, releases, or its lease is over by its own clock.
    End(usize),
    /// A release arrives, or a lease ends on a node.
    Free(usize),
    /// A node restarts and has its data; what was on its way to it and from it is lost.
    Restart(usize),
    /// A node restarts empty.
    Forget(usize),
    /// Whatever began before the restart is over.
    Recover(usize),
    /// A majority still holds for this client: it goes on holding, and is brought back where nobody holds.
    Renew(usize),
}

/// What is modelled.
#[derive(Debug, Clone, Copy)]
struct Redlock {
    /// A node that lost its memory does not vote until it can do no harm.
    quarantine: bool,
    /// A node accepts only above what it accepted.
    acceptance: bool,
    /// How many attempts each client makes.
    attempts: [usize; CLIENTS],
    restarts: u8,
}

impl World {
    /// The attempt that a client is at.
    fn current(&self, client: usize) -> Option<Attempt> {
        let state = &self.clients[client];
        (state.phase != Phase::Idle).then(|| client * ATTEMPTS + state.attempts - 1)
    }

    fn is_current(&self, attempt: Attempt) -> bool {
        self.current(attempt / ATTEMPTS) == Some(attempt)
    }

    /// All attempts that are not over.
    fn begun(&self) -> Set {
        (0..CLIENTS).filter_map(|client| self.current(client)).fold(0, |set, attempt| set | 1 << attempt)
    }

    fn propose(&mut self, client: usize) {
        let state = &mut self.clients[client];
        let attempt = client * ATTEMPTS + state.attempts;
        let last = if state.attempts > 0 { self.tokens[attempt - 1] } else { 0 };
        // The clock stands still: nothing but the rule makes tokens grow.
        self.tokens[attempt] = state.seen.max(last) + 1;
        state.attempts += 1;
        state.phase = Phase::Asks(0);
        for node in &mut self.nodes {
            node.asked |= 1 << attempt;
        }
    }

    fn end(&mut self, client: usize) {
        let Some(attempt) = self.current(client) else { return };
        self.clients[client].phase = Phase::Idle;
        for node in &mut self.nodes {
            // Nobody counts these any more.
            node.granted &= !(1 << attempt);
        }
    }

    /// A client counts the votes for the attempt that it is at.
    fn count(&mut self, attempt: Attempt, node: usize) {
        self.nodes[node].granted &= !(1 << attempt);
        let client = &mut self.clients[attempt / ATTEMPTS];
        let Phase::Asks(votes) = &mut client.phase else { return };
        *votes |= 1 << node;
        if votes.count_ones() >= MAJORITY {
            client.phase = Phase::Holds;
            let token = self.tokens[attempt];
            self.grown &= token > self.newest;
            self.newest = self.newest.max(token);
            self.grants += 1;
        }
    }

    fn renew(&mut self, client: usize) -> Option<()> {
        let attempt = self.current(client)?;
        let holding = self.nodes.iter().filter(|node| node.holder == Some(attempt)).count();
        if self.clients[client].phase != Phase::Holds || holding < MAJORITY as usize {
            return None;
        }
        for node in &mut self.nodes {
            if node.holder.is_none() {
                node.holder = Some(attempt);
                node.highest = node.highest.max(Some((self.tokens[attempt], attempt)));
            }
            // Its lease is another one now, which the nodes keep that hold.
            node.quarantine = node.quarantine.map(|begun| begun & !(1 << attempt));
        }
        Some(())
    }
}

impl Redlock {
    fn ask(&self, world: &mut World, attempt: Attempt, index: usize) {
        let token = world.tokens[attempt];
        let node = &mut world.nodes[index];
        node.asked &= !(1 << attempt);
        let above = node.highest.is_none_or(|(highest, whose)| token > highest || whose == attempt);
        let free = node.holder.is_none_or(|holder| holder == attempt);
        if free && (above || !self.acceptance) {
            node.holder = Some(attempt);
            node.highest = node.highest.max(Some((token, attempt)));
            if node.quarantine.is_none() && token > node.floor {
                node.granted |= 1 << attempt;
            }
            if !world.is_current(attempt) {
                world.nodes[index].granted &= !(1 << attempt);
            }
        } else if world.is_current(attempt) {
            // The answer names what is in the way.
            let told = world.nodes[index].highest.map_or(0, |(highest, _)| highest);
            let client = &mut world.clients[attempt / ATTEMPTS];
            client.seen = client.seen.max(told);
        }
    }

    fn forget(&self, world: &mut World, index: usize) {
        world.restarts += 1;
        let begun = world.begun();
        let floor = world.tokens.iter().copied().max().unwrap_or(0);
        let node = &mut world.nodes[index];
        let on_their_way = Node { asked: node.asked, granted: node.granted, ..Node::default() };
        *node = if self.quarantine { Node { quarantine: Some(begun), floor, ..on_their_way } } else { on_their_way };
    }
}

fn members(set: Set) -> impl Iterator<Item = usize> {
    (0..8).filter(move |index| set & 1 << index != 0)
}

impl Model for Redlock {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        // The second client's clock is ahead.
        let clients = [Client::default(), Client { seen: 1, ..Client::default() }];
        vec![World {
            nodes: Default::default(),
            clients,
            tokens: Default::default(),
            restarts: 0,
            newest: 0,
            grants: 0,
            grown: true,
        }]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        for (index, client) in world.clients.iter().enumerate() {
            match client.phase {
                Phase::Idle if client.attempts < self.attempts[index] => steps.push(Step::Propose(index)),
                Phase::Idle => {}
                Phase::Asks(_) => steps.push(Step::End(index)),
                Phase::Holds => steps.extend([Step::End(index), Step::Renew(index)]),
            }
        }
        for (index, node) in world.nodes.iter().enumerate() {
            steps.extend(members(node.asked).map(|attempt| Step::Ask(attempt, index)));
            steps.extend(members(node.granted).map(|attempt| Step::Vote(attempt, index)));
            if node.holder.is_some_and(|attempt| !world.is_current(attempt)) {
                steps.push(Step::Free(index));
            }
            if world.restarts < self.restarts {
                steps.extend([Step::Forget(index), Step::Restart(index)]);
            }
            if node.quarantine.is_some_and(|begun| begun & world.begun() == 0) {
                steps.push(Step::Recover(index));
            }
        }
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut next = *world;
        match step {
            Step::Propose(client) => next.propose(client),
            Step::Ask(attempt, node) => self.ask(&mut next, attempt, node),
            Step::Vote(attempt, node) => next.count(attempt, node),
            Step::End(client) => next.end(client),
            Step::Free(node) => next.nodes[node].holder = None,
            Step::Restart(node) => {
                next.restarts += 1;
                (next.nodes[node].asked, next.nodes[node].granted) = (0, 0);
            }
            Step::Forget(node) => self.forget(&mut next, node),
            Step::Recover(node) => next.nodes[node].quarantine = None,
            Step::Renew(client) => next.renew(client)?,
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("one holder at a time", |_, world: &World| {
                world.clients.iter().filter(|client| client.phase == Phase::Holds).count() <= 1
            }),
            Property::always("tokens grow", |_, world: &World| world.grown),
            Property::sometimes("the lock changes hands", |_, world: &World| world.grants >= 2),
        ]
    }
}

const SAFE: Redlock = Redlock { quarantine: true, acceptance: true, attempts: [1, 1], restarts: 1 };

#[test]
fn nobody_holds_beside_somebody_else_and_tokens_grow() {
    let checker = SAFE.checker().threads(2).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    checker.assert_properties();
}

/// More attempts without restarts: late messages of one attempt meet the next one.
#[test]
fn late_messages_of_an_attempt_do_no_harm_to_the_next_one() {
    let checker = Redlock { attempts: [2, 1], restarts: 0, ..SAFE }.checker().threads(2).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    checker.assert_properties();
}

#[test]
fn without_quarantine_the_checker_finds_two_holders() {
    let checker = Redlock { quarantine: false, ..SAFE }.checker().threads(2).spawn_bfs().join();
    println!("{:?}", checker.assert_any_discovery("one holder at a time").into_actions());
}

#[test]
fn without_the_acceptance_rule_the_checker_finds_a_repeated_token() {
    let checker = Redlock { acceptance: false, restarts: 0, ..SAFE }.checker().threads(2).spawn_bfs().join();
    println!("{:?}", checker.assert_any_discovery("tokens grow").into_actions());
    checker.assert_no_discovery("one holder at a time");
}
