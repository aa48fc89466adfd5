//! The tool as its users meet it: every test starts the real binary, on a directory or a server of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod admin;
mod elect;
mod endings;
mod engines;
mod harness;
mod inputs;
mod loss;
mod run;
mod terminal;
