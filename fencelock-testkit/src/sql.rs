//! What tests need of a database, whichever it is.

use fencelock::{Client, connect};

/// A database with nothing in it, made for one test.
pub trait SqlBase: Sized + Send + Sync + 'static {
    /// Makes one.
    fn make() -> Self;

    /// The port of its server.
    fn port(&self) -> u16;

    /// Where clients connect to that go through another port: a proxy's.
    fn url_through(&self, port: u16) -> String;

    /// Where clients connect to.
    fn address(&self) -> String {
        self.url_through(self.port())
    }

    /// The full name of one of fencelock's tables.
    fn table(&self, name: &str) -> String;

    /// Runs SQL in it, and returns the rows as texts.
    fn sql(&self, sql: &str) -> Vec<Vec<String>>;

    /// A statement that takes so long.
    fn nap(seconds: f64) -> String;

    /// How many connections fencelock has to it.
    fn connections(&self) -> usize;

    /// Ends all of them.
    fn cut_connections(&self);

    /// How many rows one of fencelock's tables has.
    fn rows(&self, table: &str) -> usize {
        let rows = self.sql(&format!("SELECT count(*) FROM {}", self.table(table)));
        rows[0][0].parse().expect("a number")
    }

    /// A client of its own, as another program would have it.
    fn client(&self) -> impl Future<Output = Client> + Send {
        let url = self.address();
        async move { connect(url).await.expect("the database can be used") }
    }
}

/// A database on a server of its own, which can be killed.
pub trait SqlServer: SqlBase {
    /// Ends the server on the spot, as `kill -9` does.
    fn kill(&mut self);

    /// Starts it again on the same port, with the data that it kept, and waits until it serves.
    fn start_again(&mut self);

    /// How many statements fencelock has sent so far that change locks, and how many in all.
    fn statements(&self) -> (usize, usize);
}
