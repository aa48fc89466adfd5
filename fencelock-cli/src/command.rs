//! The command that is to be run: whether it can be, and what it is told in its environment.

use crate::exit::{Failure, NOT_FOUND};
use crate::hold::{Held, Holding};
use crate::supervised::cannot_run;
use rustix::fs::{Access, access};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Looks for the program, so that nobody waits in line for nothing.
///
/// # Errors
/// 126 or 127, as it would be later.
pub(crate) fn check(command: &[OsString]) -> Result<(), Failure> {
    let Some(program) = command.first() else { return Ok(()) };
    if program.is_empty() {
        return Err(Failure::new(
            NOT_FOUND,
            "command not found: it is an empty word; is a variable empty that should hold it?",
        ));
    }
    find(program).map_err(|error| cannot_run(&program.to_string_lossy(), &error))
}

fn find(program: &OsStr) -> io::Result<()> {
    if program.as_encoded_bytes().contains(&b'/') {
        return executable(Path::new(program));
    }
    // Without a PATH the system has one of its own.
    let Some(path) = std::env::var_os("PATH") else { return Ok(()) };
    let mut outcome = Err(io::ErrorKind::NotFound.into());
    for directory in std::env::split_paths(&path) {
        // An empty entry is the current directory.
        let directory = if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory };
        match executable(&directory.join(program)) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => outcome = Err(error),
            Err(_) => {}
        }
    }
    outcome
}

fn executable(path: &Path) -> io::Result<()> {
    if std::fs::metadata(path)?.is_dir() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(access(path, Access::EXEC_OK)?)
}

/// What the command is told of its lock.
pub(crate) fn environment(holding: &Holding, url: &str) -> Vec<(&'static str, OsString)> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let deadline = (now + holding.valid_for()).as_millis();
    let mut held = Held::outer();
    held.extend(holding.held(url));
    vec![
        ("FENCELOCK_HELD", serde_json::to_string(&held).unwrap_or_default().into()),
        ("FENCELOCK_NAME", holding.name().into()),
        ("FENCELOCK_TOKEN", holding.token().to_string().into()),
        ("FENCELOCK_OWNER", holding.owner().to_string().into()),
        ("FENCELOCK_URL", url.into()),
        ("FENCELOCK_DEADLINE", deadline.to_string().into()),
    ]
}

/// Who we are, for people who look at the line: `alice@web1:1234 backup.sh`. Without the arguments, which may be secret.
pub(crate) fn label(command: &[OsString]) -> String {
    let program = command.first().map(|word| Path::new(word).file_name().unwrap_or(word).to_string_lossy());
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy();
    format!("{}@{host}:{} {}", user(), std::process::id(), program.unwrap_or_default())
}

fn user() -> String {
    let given = ["USER", "LOGNAME"].iter().find_map(|key| std::env::var(key).ok().filter(|name| !name.is_empty()));
    let uid = nix::unistd::Uid::effective();
    let known = || nix::unistd::User::from_uid(uid).ok().flatten().map(|user| user.name);
    given.or_else(known).unwrap_or_else(|| format!("uid{uid}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_looked_for_as_a_shell_does() {
        let code = |program: &str| check(&[program.into()]).map_or_else(|failure| failure.code, |()| 0);
        assert_eq!(code("sh"), 0);
        assert_eq!(code("/bin/sh"), 0);
        assert_eq!(code("no-such-command"), 127);
        assert_eq!(code("/no/such/command"), 127);
        assert_eq!(code(""), 127);
        assert_eq!(code("/etc/passwd"), 126);
        assert_eq!(code("/etc"), 126);
    }

    #[test]
    fn the_label_names_user_host_process_and_program() {
        let label = label(&["/usr/bin/backup.sh".into(), "--password=x".into()]);
        assert!(label.contains('@') && label.ends_with(&format!(":{} backup.sh", std::process::id())), "{label}");
    }
}
