//! Every primitive that can serve as a mutex, behind one face: what holds for one of them must hold for all.

use fencelock::{All, Client, Guard, Mutex, Owner, Result, RwLock, Semaphore};
use std::time::Duration;

/// Which primitive plays the mutex.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The mutex itself.
    Mutex,
    /// The writing side of a read/write lock.
    Writer,
    /// A semaphore with one permit.
    OnePermit,
    /// Several locks at once, of which there is one.
    AllOfOne,
}

impl Kind {
    /// A lock of this kind.
    pub fn lock(self, client: &Client, name: &str) -> Lock {
        Lock(match self {
            Kind::Mutex => Primitive::Mutex(client.mutex(name)),
            Kind::Writer => Primitive::Writer(client.rwlock(name)),
            Kind::OnePermit => Primitive::OnePermit(client.semaphore(name, 1)),
            Kind::AllOfOne => Primitive::AllOfOne(client.all([name])),
        })
    }
}

/// A primitive in the role of a mutex.
#[derive(Debug, Clone)]
pub struct Lock(Primitive);

#[derive(Debug, Clone)]
enum Primitive {
    Mutex(Mutex),
    Writer(RwLock),
    OnePermit(Semaphore),
    AllOfOne(All),
}

macro_rules! option {
    ($(#[$doc:meta])* $option:ident: $type:ty) => {
        $(#[$doc])*
        #[must_use]
        pub fn $option(self, value: $type) -> Self {
            Self(match self.0 {
                Primitive::Mutex(lock) => Primitive::Mutex(lock.$option(value)),
                Primitive::Writer(lock) => Primitive::Writer(lock.$option(value)),
                Primitive::OnePermit(lock) => Primitive::OnePermit(lock.$option(value)),
                Primitive::AllOfOne(lock) => Primitive::AllOfOne(lock.$option(value)),
            })
        }
    };
}

impl Lock {
    option! {
        /// The lease.
        ttl: Duration
    }
    option! {
        /// The longest hold.
        max_hold: Duration
    }
    option! {
        /// What others see in the line.
        label: &str
    }
    option! {
        /// Acquires as this owner.
        owner: Owner
    }

    /// Waits in line.
    ///
    /// # Errors
    /// Those of the primitive.
    pub async fn acquire(&self) -> Result<Guard> {
        match &self.0 {
            Primitive::Mutex(lock) => lock.acquire().await,
            Primitive::Writer(lock) => lock.write().await,
            Primitive::OnePermit(lock) => lock.acquire().await,
            Primitive::AllOfOne(lock) => lock.acquire().await,
        }
    }

    /// Takes it if it is free.
    ///
    /// # Errors
    /// Those of the primitive.
    pub async fn try_acquire(&self) -> Result<Option<Guard>> {
        match &self.0 {
            Primitive::Mutex(lock) => lock.try_acquire().await,
            Primitive::Writer(lock) => lock.try_write().await,
            Primitive::OnePermit(lock) => lock.try_acquire().await,
            Primitive::AllOfOne(lock) => lock.try_acquire().await,
        }
    }

    /// Waits in line for at most this long.
    ///
    /// # Errors
    /// Those of the primitive.
    pub async fn acquire_timeout(&self, span: Duration) -> Result<Guard> {
        match &self.0 {
            Primitive::Mutex(lock) => lock.acquire_timeout(span).await,
            Primitive::Writer(lock) => lock.write_timeout(span).await,
            Primitive::OnePermit(lock) => lock.acquire_timeout(span).await,
            Primitive::AllOfOne(lock) => lock.acquire_timeout(span).await,
        }
    }
}
