//! The directory that the file engine lives in: making it, checking it, and the byte locks that tell who is there.
//!
//! ```text
//! <root>/VERSION      made last: the directory is complete
//!        claims/00…3f byte locks: a session that lives, a name that is in use by it
//!        lines/…      one file per lock in use
//!        sessions/…   one FIFO per client
//!        tokens       what the fencing tokens have reached
//! ```

use crate::{Error, ErrorKind, Result};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Byte locks are spread over this many files: the kernel searches a file's locks one by one.
const SHARDS: u64 = 64;
const VERSION: &str = "fencelock directory, version 1\n";
/// How long another process may take to set the directory up.
const PATIENCE: Duration = Duration::from_secs(2);

/// An open directory of the file engine.
pub(super) struct Root {
    /// Absolute, as the user gave it: if it comes to lead elsewhere, others lock elsewhere.
    pub(super) path: PathBuf,
    /// The directory and its parts, as they were opened.
    identities: [(PathBuf, (u64, u64)); 4],
    /// Carries the shared lock that says "in use"; see [`Root::open`].
    _presence: OwnedFd,
    pub(super) top: OwnedFd,
    pub(super) lines: OwnedFd,
    pub(super) sessions: OwnedFd,
    claims: OwnedFd,
    shards: [OnceLock<OwnedFd>; SHARDS as usize],
    /// For new files: readable and writable by whoever may use the directory.
    pub(super) mode: Mode,
}

impl Root {
    /// Opens the directory; makes and fills it if it is new. Blocks for a moment.
    ///
    /// Everybody who uses the directory holds a shared `flock` on it. A part of it that is missing is made only by who gets
    /// the exclusive one: if files were removed under living processes, a newcomer must not start afresh beside them.
    pub(super) fn open(path: &Path, allow_network: bool) -> Result<Self> {
        let path = std::path::absolute(path)
            .map_err(|error| Error::invalid(format!("bad path {}", path.display())).caused_by(error))?;
        let explain = |errno| explain(errno, &path);
        std::fs::create_dir_all(&path).map_err(|error| explain(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        let presence = open_dir(rustix::fs::CWD, &path).map_err(explain)?;
        if !allow_network {
            refuse_network(&presence, &path)?;
        }
        let top = open_dir(presence.as_fd(), ".").map_err(explain)?;
        let stat = rustix::fs::fstat(&top).map_err(explain)?;
        let mode = Mode::from_raw_mode(stat.st_mode & 0o666);
        // In a directory for a group, what is made inside belongs to the group as well.
        let for_group = stat.st_mode & 0o2000;
        enter(&presence, &top, &path, mode, for_group)?;
        let part = |name: &str| open_dir(top.as_fd(), name).map_err(explain);
        let (lines, sessions, claims) = (part("lines")?, part("sessions")?, part("claims")?);
        let identities = [
            (path.clone(), identity(&top).map_err(explain)?),
            (path.join("lines"), identity(&lines).map_err(explain)?),
            (path.join("sessions"), identity(&sessions).map_err(explain)?),
            (path.join("claims"), identity(&claims).map_err(explain)?),
        ];
        Ok(Self {
            identities,
            lines,
            sessions,
            claims,
            shards: [const { OnceLock::new() }; SHARDS as usize],
            _presence: presence,
            top,
            mode,
            path,
        })
    }

    /// Whether the path still leads to this directory and its parts.
    pub(super) fn in_place(&self) -> bool {
        let same = |(path, opened): &(PathBuf, (u64, u64))| {
            rustix::fs::stat(path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == *opened)
        };
        self.identities.iter().all(same)
    }

    /// An error in the user's words.
    pub(super) fn explain(&self, errno: Errno) -> Error {
        explain(errno, &self.path)
    }

    /// Takes the byte of `key` for as long as this `Root` lives or until [`clear`](Root::clear).
    pub(super) fn mark(&self, key: u64) -> Result<()> {
        let mut lock = byte(key, libc::F_RDLCK);
        lock.l_pid = 0;
        fcntl(self.shard(key)?, FcntlArg::F_OFD_SETLK(&lock)).map(drop).map_err(|errno| self.explain(from_nix(errno)))
    }

    pub(super) fn clear(&self, key: u64) {
        let lock = byte(key, libc::F_UNLCK);
        if let Ok(shard) = self.shard(key) {
            let _ = fcntl(shard, FcntlArg::F_OFD_SETLK(&lock));
        }
    }

    /// Whether somebody else has the byte of `key`. When in doubt, yes.
    pub(super) fn marked_by_other(&self, key: u64) -> bool {
        let mut lock = byte(key, libc::F_WRLCK);
        match self.shard(key).map(|shard| fcntl(shard, FcntlArg::F_OFD_GETLK(&mut lock))) {
            Ok(Ok(_)) => i32::from(lock.l_type) != libc::F_UNLCK,
            _ => true,
        }
    }

    fn shard(&self, key: u64) -> Result<&OwnedFd> {
        let at = key % SHARDS;
        let cell = &self.shards[usize::try_from(at).unwrap_or(0)];
        if let Some(shard) = cell.get() {
            return Ok(shard);
        }
        let shard =
            rustix::fs::openat(&self.claims, format!("{at:02x}"), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                .map_err(|errno| match errno {
                    Errno::NOENT => removed(&self.path),
                    errno => self.explain(errno),
                })?;
        Ok(cell.get_or_init(|| shard))
    }
}

/// Waits to be let in, setting the directory up if need be.
fn enter(presence: &OwnedFd, top: &OwnedFd, path: &Path, mode: Mode, for_group: u32) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let shared = rustix::fs::flock(presence, FlockOperation::NonBlockingLockShared);
        if shared.is_ok() && complete(top, path)? {
            return Ok(());
        }
        if rustix::fs::flock(presence, FlockOperation::NonBlockingLockExclusive).is_ok() {
            fill(top, mode, for_group).map_err(|errno| explain(errno, path))?;
            continue;
        }
        // Two newcomers with shared locks would wait for each other.
        let _ = rustix::fs::flock(presence, FlockOperation::Unlock);
        if Instant::now() >= until {
            return Err(match shared {
                Ok(()) => removed(path),
                Err(_) => Error::new(
                    ErrorKind::Unavailable,
                    format!("another program holds an exclusive lock on {}; let it end", path.display()),
                ),
            });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn identity(file: &OwnedFd) -> Result<(u64, u64), Errno> {
    rustix::fs::fstat(file).map(|stat| (stat.st_dev, stat.st_ino))
}

/// What stands in VERSION: the layout, and which `claims` the byte locks of this directory are in. One that was put there
/// instead, say from a backup, has none of them.
fn version(top: &OwnedFd) -> Result<String, Errno> {
    let claims = rustix::fs::statat(top, "claims", AtFlags::empty())?;
    Ok(format!("{VERSION}claims {}\n", claims.st_ino))
}

fn complete(top: &OwnedFd, path: &Path) -> Result<bool> {
    let file = match rustix::fs::openat(top, "VERSION", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(false),
        Err(errno) => return Err(explain(errno, path)),
    };
    let mut text = [0; 128];
    let length = rustix::io::read(&file, &mut text).map_err(|errno| explain(errno, path))?;
    if !text[..length].starts_with(VERSION.as_bytes()) {
        return Err(Error::invalid(format!(
            "{}/VERSION is not of this version of fencelock; use another directory, or the version that made it",
            path.display()
        )));
    }
    if version(top).is_ok_and(|version| version.as_bytes() != &text[..length]) {
        return Ok(false);
    }
    let parts = ["claims/3f", "lines", "sessions"];
    Ok(parts.iter().all(|part| rustix::fs::statat(top, *part, AtFlags::empty()).is_ok()))
}

fn fill(top: &OwnedFd, mode: Mode, for_group: u32) -> Result<(), Errno> {
    // Whoever may write to the directory may enter its parts.
    let bits = mode.as_raw_mode();
    let dir_mode = Mode::from_raw_mode(for_group | bits | 0o100 | (bits & 0o044) >> 2);
    for part in ["lines", "sessions", "claims"] {
        match rustix::fs::mkdirat(top, part, dir_mode) {
            Ok(()) => rustix::fs::chmodat(top, part, dir_mode, AtFlags::empty())?,
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    for shard in 0..SHARDS {
        create(top, &format!("claims/{shard:02x}"), mode)?;
    }
    let text = version(top)?;
    let file = create(top, "VERSION", mode)?;
    rustix::fs::ftruncate(&file, 0)?;
    rustix::io::pwrite(&file, text.as_bytes(), 0)?;
    rustix::fs::fsync(&file)?;
    rustix::fs::fsync(top)
}

/// Creates (or opens) a file for all who may use the directory, whatever the umask.
pub(super) fn create(dir: impl AsFd, name: &str, mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(dir, name, flags, mode)?;
    // Fails for somebody else's file, whose mode is right already.
    let _ = rustix::fs::fchmod(&file, mode);
    Ok(file)
}

fn open_dir(at: impl AsFd, path: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(at, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Creates a FIFO for all who may use the directory.
pub(super) fn create_fifo(dir: impl AsFd, name: &str, mode: Mode) -> Result<(), Errno> {
    rustix::fs::mknodat(&dir, name, FileType::Fifo, mode, 0)?;
    rustix::fs::chmodat(&dir, name, mode, AtFlags::empty())
}

fn byte(key: u64, kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: 0, // SEEK_SET
        l_start: i64::try_from(key / SHARDS).unwrap_or_default(),
        l_len: 1,
        l_pid: 0,
    }
}

fn from_nix(errno: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(errno as i32)
}

/// Locks on these are kept by another machine, or by nobody.
fn refuse_network(dir: &OwnedFd, path: &Path) -> Result<()> {
    let Ok(stat) = rustix::fs::fstatfs(dir) else { return Ok(()) };
    let kind = match u64::try_from(stat.f_type).unwrap_or(0) & 0xffff_ffff {
        0x6969 => "NFS",
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => "SMB",
        0x0102_1997 => "9P",
        0x00c3_6400 => "Ceph",
        0x0bd0_0bd0 => "Lustre",
        0x5346_414f | 0x6b41_4653 => "AFS",
        0x7375_7245 => "Coda",
        0x0116_1970 => "GFS2",
        0x7461_636f => "OCFS2",
        0x6573_5546 => "FUSE",
        0x786f_4256 => "VirtualBox",
        _ => return Ok(()),
    };
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "{} is on a {kind} file system, where other machines may see the files but not the locks; use a local directory, \
             or add ?network=allow if only this machine uses it",
            path.display()
        ),
    ))
}

fn removed(path: &Path) -> Error {
    Error::new(
        ErrorKind::Engine,
        format!(
            "files were removed from {} while other processes use it; end them (`fuser {}` names them), then try again",
            path.display(),
            path.display()
        ),
    )
}

fn explain(errno: Errno, path: &Path) -> Error {
    let path = path.display();
    let (kind, text) = match errno {
        Errno::ACCESS | Errno::PERM => (
            ErrorKind::Unavailable,
            format!(
                "no permission for {path}; make it writable for this user, or choose another directory: file:/path"
            ),
        ),
        Errno::ROFS => (
            ErrorKind::Unavailable,
            format!("{path} is on a read-only file system; choose another directory: file:/path"),
        ),
        Errno::NOSPC | Errno::DQUOT => (
            ErrorKind::Unavailable,
            format!("the file system of {path} is full; free some space, or choose another directory"),
        ),
        Errno::MFILE | Errno::NFILE => {
            (ErrorKind::Unavailable, "too many open files; raise the limit (ulimit -n)".to_owned())
        }
        Errno::NOTDIR | Errno::EXIST => {
            (ErrorKind::Invalid, format!("{path} is not a directory; the file engine needs one of its own: file:/path"))
        }
        Errno::ISDIR => (
            ErrorKind::Invalid,
            format!(
                "there is a directory inside of {path} where fencelock expects a file; remove it, or use another path"
            ),
        ),
        Errno::LOOP | Errno::NAMETOOLONG | Errno::INVAL => {
            (ErrorKind::Invalid, format!("{path} cannot be used as a directory for locks; choose another: file:/path"))
        }
        _ => (ErrorKind::Engine, format!("the file system refused an operation in {path}")),
    };
    Error::new(kind, text).caused_by(std::io::Error::from(errno))
}
