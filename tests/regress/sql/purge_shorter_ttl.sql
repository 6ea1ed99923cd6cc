-- After idem.ttl was made shorter, a segment waits for its old bound. The ring goes on around it, and what is in it still counts.
-- It changes the ring for the whole database: one of its own.
\set database :DBNAME
CREATE DATABASE regress_idem_shorter;
\c regress_idem_shorter
CREATE EXTENSION idem;
SELECT idem_once('shorter-1');
SET idem.ttl = '1 h';
SELECT 'UPDATE idem_ring SET started_at = started_at - interval ''30 min''', 'SELECT idem_purge()' FROM generate_series(1, 9) \gexec
SELECT turn, turn % 8 AS segment, bound > now() + interval '40 h' AS bound_is_old FROM idem_ring ORDER BY turn;
SELECT idem_once('shorter-1'), idem_once('shorter-2');
SELECT key FROM idem_segment_0;
SELECT key FROM idem_segment_2;
-- When its bound has passed it is emptied, and has its turn again.
UPDATE idem_ring SET bound = bound - interval '42 h' WHERE turn = 0;
UPDATE idem_segment_0 SET expires_at = expires_at - interval '42 h';
SELECT idem_purge();
SELECT 'UPDATE idem_ring SET started_at = started_at - interval ''30 min''', 'SELECT idem_purge()' FROM generate_series(1, 6) \gexec
SELECT max(turn), (SELECT count(*) FROM idem_segment_0) AS left FROM idem_ring;
\c :database
DROP DATABASE regress_idem_shorter;
