\set key random(100000000000000, 999999999999999)
SELECT idem_run(:key::text, 'work(jsonb)', '{"sku": "book", "qty": 1}');
