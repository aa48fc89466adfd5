//! `status`, `list` and `break`: for people who look at locks, and now and then take one away.

use crate::args::{Break, List, Status as StatusArgs};
use crate::console::say;
use crate::exit::{Exit, Failure, UNAVAILABLE};
use crate::run::reach;
use crate::text::{plain, span, table};
use fencelock::{Client, Holder, Name, Status};
use std::io::{self, BufRead, IsTerminal, Write};

pub(crate) async fn status(url: &str, args: &StatusArgs) -> Result<Exit, Failure> {
    let Some(name) = &args.name else {
        return show_all(url, "", args.json).await;
    };
    Name::new(name)?;
    let client = reach(url).await?;
    let status = client.status(name).await?;
    if args.json {
        print_json(&status)
    } else {
        print(&format!("{}{}{}", holders(std::slice::from_ref(&status)), waiters(&status), obstacle(&status)))
    }
}

pub(crate) async fn list(url: &str, args: &List) -> Result<Exit, Failure> {
    show_all(url, &args.prefix, args.json).await
}

async fn show_all(url: &str, prefix: &str, json: bool) -> Result<Exit, Failure> {
    let client = reach(url).await?;
    let found = client.list(prefix).await?;
    if json {
        return print_json(&found);
    }
    if found.is_empty() {
        if io::stdout().is_terminal() {
            say(&format!("no lock is in use on {}", client.address()));
        }
        return Ok(Exit::OK);
    }
    print(&holders(&found))
}

fn holders(all: &[Status]) -> String {
    let mut rows = Vec::new();
    for status in all {
        let name = plain(&status.name);
        let waiting = status.waiters.len().to_string();
        if !status.is_held() {
            let none = || "-".to_owned();
            rows.push([name.clone(), "free".to_owned(), none(), none(), none(), none(), none(), waiting.clone()]);
        }
        rows.extend(status.holders.iter().map(|holder| row(&name, holder, &waiting)));
    }
    table(["NAME", "STATE", "HOLDER", "MODE", "HELD", "TOKEN", "LEASE", "WAITERS"], &rows)
}

fn row(name: &str, holder: &Holder, waiting: &str) -> [String; 8] {
    [
        name.to_owned(),
        "held".to_owned(),
        plain(&holder.label),
        holder.mode.to_string(),
        span(holder.held_for),
        holder.token.to_string(),
        span(holder.lease_left),
        waiting.to_owned(),
    ]
}

fn waiters(status: &Status) -> String {
    if status.waiters.is_empty() {
        return String::new();
    }
    let waiters = status.waiters.iter().enumerate();
    let rows: Vec<[String; 4]> = waiters
        .map(|(place, waiter)| {
            [(place + 1).to_string(), plain(&waiter.label), waiter.mode.to_string(), span(waiter.waiting_for)]
        })
        .collect();
    format!("\n{}", table(["PLACE", "WAITER", "MODE", "WAITING"], &rows))
}

/// What is in the way of whoever wants the lock, apart from its holders.
fn obstacle(status: &Status) -> String {
    status.obstacle.as_ref().map(|obstacle| format!("\n{}\n", plain(obstacle))).unwrap_or_default()
}

pub(crate) async fn take_away(url: &str, args: &Break) -> Result<Exit, Failure> {
    Name::new(&args.name)?;
    let asks = io::stdin().is_terminal() && io::stderr().is_terminal();
    if !args.yes && !asks {
        return Err(Failure::usage("break takes a lock away from its holder; without a terminal, confirm with --yes"));
    }
    let client = reach(url).await?;
    if !args.yes && !confirmed(&client, &args.name).await? {
        return Ok(Exit::Code(1));
    }
    let count = client.evict(&args.name).await?;
    let name = format!("{:?}", args.name);
    print(&match count {
        0 => format!("nobody held {name}\n"),
        1 => format!("taken away: {name}, from 1 holder\n"),
        count => format!("taken away: {name}, from {count} holders\n"),
    })
}

/// Shows who would lose the lock, and asks. True when nobody would: then there is nothing to ask.
async fn confirmed(client: &Client, name: &str) -> Result<bool, Failure> {
    let status = client.status(name).await?;
    if !status.is_held() {
        return Ok(true);
    }
    let mut stderr = io::stderr();
    let _ = write!(stderr, "{}", holders(std::slice::from_ref(&status)));
    let _ = write!(stderr, "Take {name:?} away? What its holder does next may collide with the next holder. [y/N] ");
    let _ = stderr.flush();
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(|error| Failure::new(UNAVAILABLE, format!("no answer could be read: {error}; use --yes")))?;
    let yes = ["y", "yes"].contains(&answer.trim().to_lowercase().as_str());
    if !yes {
        say(&format!("{name:?} was left alone"));
    }
    Ok(yes)
}

fn print_json(value: &impl serde::Serialize) -> Result<Exit, Failure> {
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|error| Failure::new(UNAVAILABLE, format!("cannot write JSON: {error}")))?;
    print(&format!("{text}\n"))
}

/// Prints to stdout. A reader that has seen enough (`| head -1`) is no failure.
pub(crate) fn print(text: &str) -> Result<Exit, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(UNAVAILABLE, format!("cannot write to stdout: {error}")))
        }
        _ => Ok(Exit::OK),
    }
}
