//! The gate's memory: the newest token of each resource, on the disk before anybody is let in with it.
//!
//! One thread writes. What comes in while it flushes is flushed together, once: many new tokens cost few flushes, and a token that was
//! seen before costs none.

use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition, TableError,
};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, mpsc};
use tokio::sync::oneshot;

const TOKENS: TableDefinition<'_, &str, u64> = TableDefinition::new("tokens");
/// How many are flushed together at most.
const BATCH: usize = 4096;

/// One token to keep, and whom to tell.
struct Entry {
    resource: Arc<str>,
    token: u64,
    kept: oneshot::Sender<Result<(), String>>,
}

#[derive(Clone)]
pub(crate) struct Ledger {
    store: Arc<Database>,
    entries: mpsc::Sender<Entry>,
}

impl Ledger {
    /// Opens the store, or creates it.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(|error| format!("cannot create {}: {error}", dir.display()))?;
        }
        let store = Database::create(path).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => {
                format!(
                    "{shown} is in use by another gate; give each gate a --store of its own, and each upstream one gate"
                )
            }
            error => format!("cannot use the store {shown}: {error}; check the path and its permissions"),
        })?;
        let store = Arc::new(store);
        // Creates the table, and finds out whether the disk takes writes.
        write(&store, &[]).map_err(|error| format!("cannot write to the store {shown}: {error}"))?;
        let (entries, queue) = mpsc::channel();
        let writer = Arc::clone(&store);
        let thread = std::thread::Builder::new().name("ledger".into());
        thread.spawn(move || keep(&writer, &queue)).map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Self { store, entries })
    }

    /// How many resources are known.
    pub(crate) fn len(&self) -> Result<u64, String> {
        let read = self.store.begin_read().map_err(|error| error.to_string())?;
        let table = read.open_table(TOKENS).map_err(|error| error.to_string())?;
        table.len().map_err(|error| error.to_string())
    }

    /// The newest token of a resource.
    pub(crate) async fn newest(&self, resource: Arc<str>) -> Result<Option<u64>, String> {
        let store = Arc::clone(&self.store);
        let read = move || read(&store, &resource).map_err(|error| error.to_string());
        tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())?
    }

    /// Keeps a token. When this returns `Ok`, a loss of power cannot undo it.
    pub(crate) async fn keep(&self, resource: Arc<str>, token: u64) -> Result<(), String> {
        let gone = || "the thread that writes the store is gone".to_owned();
        let (kept, told) = oneshot::channel();
        self.entries.send(Entry { resource, token, kept }).map_err(|_| gone())?;
        told.await.map_err(|_| gone())?
    }
}

fn read(store: &Database, resource: &str) -> Result<Option<u64>, redb::Error> {
    let read = store.begin_read()?;
    let table = match read.open_table(TOKENS) {
        Err(TableError::TableDoesNotExist(_)) => return Ok(None),
        table => table?,
    };
    Ok(table.get(resource)?.map(|token| token.value()))
}

fn keep(store: &Database, queue: &mpsc::Receiver<Entry>) {
    while let Ok(first) = queue.recv() {
        let mut batch = vec![first];
        batch.extend(queue.try_iter().take(BATCH - 1));
        let outcome = write(store, &batch).map_err(|error| error.to_string());
        for entry in batch {
            let _ = entry.kept.send(outcome.clone());
        }
    }
}

fn write(store: &Database, batch: &[Entry]) -> Result<(), redb::Error> {
    let mut newest: HashMap<&str, u64> = HashMap::new();
    for entry in batch {
        let token = newest.entry(&entry.resource).or_default();
        *token = entry.token.max(*token);
    }
    let write = store.begin_write()?;
    {
        let mut table = write.open_table(TOKENS)?;
        for (resource, token) in newest {
            let kept = table.get(resource)?.map(|kept| kept.value());
            // A token never goes down, whatever order the entries come in.
            if kept.is_none_or(|kept| kept < token) {
                table.insert(resource, token)?;
            }
        }
    }
    write.commit()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tokens_only_grow_and_survive_the_store_being_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/down/gate.redb");
        let ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.newest("a".into()).await, Ok(None));
        let tokens = (1..=200).map(|token| ledger.keep("a".into(), (token * 7) % 200));
        futures_util::future::try_join_all(tokens).await.unwrap();
        ledger.keep("b".into(), u64::MAX).await.unwrap();
        assert_eq!(ledger.newest("a".into()).await, Ok(Some(199)));
        let error = Ledger::open(&path).err().unwrap();
        assert!(error.contains("in use by another gate"), "{error}");
        drop(ledger);
        // The thread that writes is the last to let go of the file.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let ledger = loop {
            match Ledger::open(&path) {
                Ok(ledger) => break ledger,
                Err(error) => assert!(std::time::Instant::now() < end, "{error}"),
            }
            tokio::task::yield_now().await;
        };
        assert_eq!(ledger.newest("a".into()).await, Ok(Some(199)));
        assert_eq!(ledger.newest("b".into()).await, Ok(Some(u64::MAX)));
        assert_eq!(ledger.len(), Ok(2));
    }
}
