-- Every object of the extension says what it is for, and so does every setting.
CREATE TEMP VIEW member AS
    SELECT classid, objid FROM pg_depend
    WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
        AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')
        AND classid <> 'pg_type'::regclass; -- the row types of the tables, in some versions
SELECT count(*) > 9 AS objects FROM member;
SELECT pg_describe_object(classid, objid, 0) AS without_comment FROM member
WHERE coalesce(obj_description(objid, classid::regclass::name), '') = '' ORDER BY 1;
SELECT obj_description(oid, 'pg_extension') <> '' AS extension FROM pg_extension WHERE extname = 'idem';

SET ROLE app;
SELECT count(*) FROM idem_get('comments-1'); -- loads the library
SELECT count(*) >= 4 AS settings FROM pg_settings WHERE name LIKE 'idem.%';
SELECT name AS without_description FROM pg_settings WHERE name LIKE 'idem.%' AND short_desc = '';
-- Any user may set them, but for the limit.
SELECT name, context FROM pg_settings WHERE name LIKE 'idem.%' AND context <> 'user';
