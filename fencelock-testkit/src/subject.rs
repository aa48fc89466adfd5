//! The engine that a check is about, as a URL from which independent clients are opened.

use fencelock::{Client, connect};
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempDir;

/// A place with no lock in it, made for one check and used by nobody else.
#[derive(Debug)]
pub struct Subject {
    url: String,
    /// Goes away with the subject.
    _dir: Option<TempDir>,
}

impl Subject {
    /// The place behind this URL. It must be empty.
    pub fn at(url: impl Into<String>) -> Self {
        Self { url: url.into(), _dir: None }
    }

    /// A room of the memory engine that clients of this process share.
    pub fn memory() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::at(format!("memory:subject-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// A directory of the file engine.
    ///
    /// # Panics
    /// When no directory can be made.
    pub fn file() -> Self {
        let dir = tempfile::Builder::new().prefix("fencelock-").tempdir().expect("a directory for the locks");
        Self { url: format!("file:{}", dir.path().display()), _dir: Some(dir) }
    }

    /// Where clients connect to.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A client of its own, as another program would have it.
    ///
    /// # Panics
    /// When the engine cannot be used.
    pub async fn client(&self) -> Client {
        connect(&self.url).await.expect("the engine can be used")
    }
}
